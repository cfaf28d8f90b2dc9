-- A source partition that has ended is read on: the marks of its end are set back, in one transaction under the locks
-- of all headers (`deploy.sql` has the lock).

-- name: read_ended_partition
-- Reads whether a grant on a source partition is current, and whether the partition has ended. Zero rows: there is no
-- such partition.
SELECT i.sequencer = %(sequencer)s::bigint AND i.worker_id IS NOT NULL, i.low_watermark >= 4611686018427387904
  FROM mill.intervals AS i WHERE i.interval_id = %(interval_id)s;

-- name: read_behind_end
-- Reads the intervals behind a source partition: whether each has processed the end of all its inputs, and its
-- watermarks. Zero rows: the source has no consumer.
WITH RECURSIVE behind AS (
    SELECT i.computation_id FROM mill.intervals AS i WHERE i.interval_id = %(interval_id)s
     UNION
    SELECT u.consumer_id FROM behind AS b
      JOIN mill.streams AS s ON s.producer_id = b.computation_id
      JOIN mill.subscriptions AS u USING (stream_id)
)
SELECT i.interval_id, c.name, i.input_watermark, i.low_watermark
  FROM behind AS b JOIN mill.computations AS c USING (computation_id) JOIN mill.intervals AS i USING (computation_id)
 WHERE c.kind <> 'injector' ORDER BY i.interval_id;

-- name: count_unprocessed_ends
-- Counts the consumers that have not processed the end of these intervals, which have ended. Always one row.
SELECT count(*)
  FROM mill.cursors AS k JOIN mill.intervals AS p ON p.interval_id = k.producer
 WHERE k.producer = ANY (%(intervals)s) AND p.low_watermark >= 4611686018427387904
   AND k.watermark < 4611686018427387904;

-- name: read_newest_event_times
-- Reads the newest event time of each source. Zero rows: no source has taken a record.
SELECT c.name, max((e.value ->> 'newest_event_time')::bigint)
  FROM mill.entries AS e JOIN mill.intervals AS i USING (interval_id) JOIN mill.computations AS c USING (computation_id)
 WHERE i.graph_id = %(graph_id)s AND c.kind = 'injector' AND e.kind = %(kind)s AND e.namespace = 'source'
 GROUP BY c.name;

-- name: set_back_cursors
-- Consumers see the watermark again that an ended interval had before its end. Zero rows: it has no consumer.
UPDATE mill.cursors AS k SET watermark = %(watermark)s::bigint
  FROM mill.intervals AS p
 WHERE p.interval_id = k.producer AND k.producer = ANY (%(intervals)s)
   AND p.low_watermark >= 4611686018427387904 AND k.watermark >= 4611686018427387904;

-- name: disown_consumers
-- Takes consumers that have not processed the end of all their inputs from their owners: these remember the end that is
-- set back. Zero rows: there are none.
UPDATE mill.intervals AS i SET worker_id = NULL, sequencer = i.sequencer + 1
 WHERE NOT i.interval_id = ANY (%(intervals)s)
   AND EXISTS (SELECT FROM mill.cursors AS k WHERE k.consumer = i.interval_id AND k.producer = ANY (%(intervals)s));

-- name: set_back_intervals
-- Sets the ends of intervals back to a watermark, and takes them from their owners. The windows that the end has closed
-- stay closed (I7). Always one row for each interval.
UPDATE mill.intervals AS i
   SET input_watermark = CASE WHEN i.input_watermark >= 4611686018427387904 THEN %(watermark)s::bigint
                              ELSE i.input_watermark END,
       low_watermark = CASE WHEN i.low_watermark >= 4611686018427387904 THEN %(watermark)s::bigint
                            ELSE i.low_watermark END,
       horizon_floor = greatest(i.horizon_floor, f.closed_end),
       worker_id = NULL, sequencer = i.sequencer + 1
  FROM unnest(%(intervals)s, %(closed_ends)s) AS f (interval_id, closed_end)
 WHERE i.interval_id = f.interval_id;

-- name: forget_runs
-- The end has expired all ids of these intervals. Zero rows: they have none.
DELETE FROM mill.dedupe_runs WHERE interval_id = ANY (%(intervals)s);

-- name: mark_closed_end
-- An audit recounts no window from before the end (`model/changed_meaning.py`). Always one row.
UPDATE mill.graphs
   SET description = jsonb_set(description, ARRAY['computations', %(computation)s, 'changed_us'],
           to_jsonb(greatest(%(closed_end)s::bigint,
                             (description #>> ARRAY['computations', %(computation)s, 'changed_us'])::bigint)))
 WHERE graph_id = %(graph_id)s;

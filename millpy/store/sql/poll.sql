-- name: poll
-- Reads headers, and segments above the cursors, in one snapshot: a watermark belongs to a position (I5). Each query
-- gives at least one row, whose seq is null when there is no segment. Zero rows: the producer does not exist. A query
-- reads up to segments_max rows for each subscription and each slot that holds data. Where it meets that limit, only
-- the seqs before the last row are known to be complete; `known` is that bound. Segments beyond its share of bytes
-- are cut at a seq boundary as well, except for the first seq.
WITH queries AS MATERIALIZED (
    SELECT w.place, w.consumer_index, w.producer, w.after, i.bundle AS head_seq, i.low_watermark AS head_watermark,
           greatest(1, %(bytes_max)s::bigint / greatest(1, count(*) FILTER (WHERE i.bundle > w.after) OVER ())) AS share
      FROM unnest(%(places)s, %(consumer_indexes)s, %(producers)s, %(afters)s)
        AS w (place, consumer_index, producer, after)
      JOIN mill.intervals AS i ON i.interval_id = w.producer
), pairs AS (
    SELECT w.place, w.consumer_index + 1 AS slice, w.producer, w.after, w.head_seq, w.share, a.subscription_id
      FROM queries AS w
      JOIN unnest(%(subscribed_places)s, %(subscriptions)s) AS a (place, subscription_id) ON a.place = w.place
     WHERE w.head_seq > w.after
), found AS MATERIALIZED (
    SELECT p.place, p.share, s.*, count(*) OVER probe AS probed, max(s.seq) OVER probe AS probed_to,
           count(*) OVER (PARTITION BY p.place) AS found
      FROM pairs AS p
     CROSS JOIN (SELECT slot FROM mill.epochs WHERE ring = 'segments' AND state <> 'free') AS live
     CROSS JOIN LATERAL (
           SELECT s.subscription_id, s.slot, s.seq, s.previous_seq, s.watermark, s.records[p.slice] AS records,
                  s.checksums[p.slice] AS checksum, coalesce(s.ends[p.slice - 1], 0) AS starts,
                  s.ends[p.slice] - coalesce(s.ends[p.slice - 1], 0) AS bytes, s.payload
             FROM mill.segments AS s
            WHERE s.slot = live.slot AND s.subscription_id = p.subscription_id AND s.producer = p.producer
              AND s.seq > p.after
            ORDER BY s.seq LIMIT %(segments_max)s::integer) AS s
    WINDOW probe AS (PARTITION BY p.place, s.subscription_id, s.slot)
), known AS (
    SELECT place, min(probed_to) FILTER (WHERE probed >= %(segments_max)s::integer) AS bound FROM found GROUP BY place
), counted AS (
    SELECT f.*, sum(f.bytes) OVER (PARTITION BY f.place ORDER BY f.seq)
                - sum(f.bytes) OVER (PARTITION BY f.place, f.seq) AS bytes_before
      FROM found AS f JOIN known AS k ON k.place = f.place AND f.seq < coalesce(k.bound, 9223372036854775807)
), given AS (
    SELECT c.*, count(*) OVER (PARTITION BY c.place) AS given FROM counted AS c WHERE c.bytes_before < c.share
)
SELECT w.place, w.head_seq, w.head_watermark, coalesce(g.given < g.found, false) AS truncated,
       g.subscription_id, g.seq, g.previous_seq, g.watermark, g.records, g.checksum,
       CASE WHEN g.bytes > 0 THEN substr(g.payload, (g.starts + 1)::integer, g.bytes::integer) END AS payload
  FROM queries AS w
  LEFT JOIN given AS g ON g.place = w.place
 ORDER BY w.place, g.seq, g.subscription_id;

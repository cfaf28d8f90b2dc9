-- The reads of an owner. After a claim it reads in pieces, which are one state as long as the header stays the same
-- (see recovery.py). It reads state on demand in one snapshot, in a transaction that locks mill.deltas first, so that
-- no slot is emptied meanwhile.

-- name: lock_deltas
-- Keeps slots from being emptied until the end of the transaction: a snapshot does not protect rows from TRUNCATE.
LOCK TABLE mill.deltas IN ACCESS SHARE MODE;

-- name: read_header
-- All windows that end by the last column have fired: a late record opens one behind the low watermark, and its pane may
-- wait for a later turn. Zero rows: the interval does not exist.
SELECT sequencer, bundle, folded_bundle, input_watermark, low_watermark, processing_floor, horizon_floor,
       least(low_watermark, oldest_work)
  FROM mill.intervals WHERE interval_id = %(interval)s;

-- name: count_state
-- Counts folded rows of state, up to rows_max + 1, and tells whether there is an outbox. Always one row.
SELECT count(*), EXISTS (SELECT FROM mill.outbox WHERE interval_id = %(interval)s)
                 OR EXISTS (SELECT FROM mill.deliveries WHERE interval_id = %(interval)s)
  FROM (SELECT FROM mill.keyed WHERE interval_id = %(interval)s AND kind = 'state' LIMIT %(rows_max)s::bigint + 1) AS counted;

-- name: read_cursors
-- Zero rows: the consumer has no producers.
SELECT producer, seq, watermark FROM mill.cursors WHERE consumer = %(interval)s;

-- name: read_last_segments
-- Zero rows: the interval has written no segment yet.
SELECT subscription_id, seq FROM mill.last_segments WHERE producer = %(interval)s;

-- name: read_deltas
-- Reads documents of (after, upto], oldest first: about bytes_max of them and at least one. `found` is the number of
-- all that are left. Zero rows: no document is left.
SELECT p.bundle, p.document::text AS document, p.part, p.found
  FROM (SELECT d.bundle, d.part, d.document, count(*) OVER () AS found,
               sum(d.bytes) OVER (ORDER BY d.bundle, d.part) - d.bytes AS before
          FROM mill.deltas AS d
         WHERE d.interval_id = %(interval)s AND d.bundle >= %(after)s AND d.bundle <= %(upto)s
           AND (d.bundle, d.part) > (%(after)s::bigint, %(after_part)s::integer)) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.bundle, p.part;

-- name: read_keyed
-- Reads the next folded rows of some kinds, in index order: about bytes_max of them and at least one. `found` counts
-- the rows that are left, up to rows_max. Zero rows: no row is left.
SELECT p.kind, p.namespace, p.key, p.subkey, p.key_hash, p.fire_at, p.value, p.text_hash, p.subkey_hash,
       p.found
  FROM (SELECT f.*, count(*) OVER () AS found,
               sum(f.bytes) OVER (ORDER BY f.kind, f.text_hash, f.namespace, f.subkey_hash, f.key_hash) - f.bytes AS before
          FROM (SELECT k.kind, k.namespace, k.key, k.subkey, k.key_hash, k.fire_at, k.value,
                       octet_length(k.value) AS bytes,
                       hashtextextended(k.key, 0) AS text_hash, hashtextextended(k.subkey, 0) AS subkey_hash
                  FROM mill.keyed AS k
                 WHERE k.interval_id = %(interval)s AND k.kind < %(kind_end)s
                   AND (k.kind, hashtextextended(k.key, 0), k.namespace, hashtextextended(k.subkey, 0), k.key_hash)
                       > (%(kind)s::text, %(text_hash)s::bigint, %(namespace)s::text, %(subkey_hash)s::bigint, %(key_hash)s::bigint)
                 ORDER BY k.kind, hashtextextended(k.key, 0), k.namespace, hashtextextended(k.subkey, 0), k.key_hash
                 LIMIT %(rows_max)s::integer) AS f) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.kind, p.text_hash, p.namespace, p.subkey_hash, p.key_hash;

-- name: read_folded_bundle
-- Zero rows: the grant is stale.
SELECT bundle, folded_bundle FROM mill.intervals WHERE interval_id = %(interval)s AND sequencer = %(sequencer)s;

-- name: load_state
-- Reads folded state of some keys. Zero rows: the keys have no folded state.
SELECT k.namespace, k.key, k.subkey, k.key_hash, k.fire_at, k.value
  FROM unnest(%(keys)s) AS asked (key)
  JOIN mill.keyed AS k
    ON k.interval_id = %(interval)s AND k.kind = 'state'
   AND hashtextextended(k.key, 0) = hashtextextended(asked.key COLLATE "C", 0)
   AND k.key = asked.key;

-- name: count_windows
-- Counts folded rows of windows, up to rows_max + 1. Always one row.
SELECT count(*) FROM (SELECT FROM mill.keyed WHERE interval_id = %(interval)s AND kind = 'window'
                       LIMIT %(rows_max)s::bigint + 1) AS counted;

-- name: read_subkeys
-- Reads the subkeys of the interval's folded windows, with one index probe for each. Zero rows: it has no window.
WITH RECURSIVE found AS (
    (SELECT split_part(k.subkey, '/', 2)::bigint AS ends, split_part(k.subkey, '/', 1)::bigint AS starts, k.subkey
       FROM mill.keyed AS k
      WHERE k.interval_id = %(interval)s AND k.kind = 'window'
      ORDER BY split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint
      LIMIT 1)
    UNION ALL
    SELECT following.ends, following.starts, following.subkey
      FROM found
     CROSS JOIN LATERAL (
           SELECT split_part(k.subkey, '/', 2)::bigint AS ends, split_part(k.subkey, '/', 1)::bigint AS starts, k.subkey
             FROM mill.keyed AS k
            WHERE k.interval_id = %(interval)s AND k.kind = 'window'
              AND (split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint) > (found.ends, found.starts)
            ORDER BY split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint
            LIMIT 1) AS following
)
SELECT subkey FROM found;

-- name: read_window
-- Reads the next folded rows of a window, in index order: about bytes_max of them and at least one. `found` counts the
-- rows that are left, up to rows_max. Zero rows: no row is left.
SELECT p.subkey, p.key, p.key_hash, p.fire_at, p.value, p.found
  FROM (SELECT f.*, count(*) OVER () AS found,
               sum(f.bytes) OVER (ORDER BY f.key_hash, f.key) - f.bytes AS before
          FROM (SELECT k.subkey, k.key, k.key_hash, k.fire_at, k.value, octet_length(k.value) AS bytes
                  FROM mill.keyed AS k
                 WHERE k.interval_id = %(interval)s AND k.kind = 'window'
                   AND split_part(k.subkey, '/', 2)::bigint = split_part(%(subkey)s::text, '/', 2)::bigint
                   AND split_part(k.subkey, '/', 1)::bigint = split_part(%(subkey)s::text, '/', 1)::bigint
                   AND k.key_hash >= %(key_hash)s::bigint
                   AND (k.key_hash, k.key) > (%(key_hash)s::bigint, %(key)s::text)
                 ORDER BY k.key_hash, k.key
                 LIMIT %(rows_max)s::integer) AS f) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.key_hash, p.key;

-- name: load_unfired
-- Reads the next folded panes of a window that need something (`PaneNeed`), in index order: up to rows_max, about
-- bytes_max of them and at least one. Zero rows: no such pane is left.
SELECT p.key, p.key_hash, p.fire_at, p.value
  FROM (SELECT f.*, sum(f.bytes) OVER (ORDER BY f.key_hash, f.key) - f.bytes AS before
          FROM (SELECT k.key, k.key_hash, k.fire_at, k.value, octet_length(k.value) AS bytes
                  FROM mill.keyed AS k
                 WHERE k.interval_id = %(interval)s AND k.kind = 'window'
                   AND split_part(k.subkey, '/', 2)::bigint = split_part(%(subkey)s::text, '/', 2)::bigint
                   AND split_part(k.subkey, '/', 1)::bigint = split_part(%(subkey)s::text, '/', 1)::bigint
                   AND k.key_hash >= %(key_hash)s::bigint
                   AND (k.key_hash, k.key) > (%(key_hash)s::bigint, %(key)s::text)
                   AND CASE %(need)s::text
                       WHEN 'emission' THEN k.value::json ->> 'emitted' IS DISTINCT FROM 'true'
                       WHEN 'end' THEN k.value::json -> 'firing' ->> 'passed' IS DISTINCT FROM 'true'
                       ELSE k.value::json -> 'firing' ->> 'waits' IS NOT DISTINCT FROM 'true' END
                 ORDER BY k.key_hash, k.key
                 LIMIT %(rows_max)s::bigint) AS f) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.key_hash, p.key;

-- name: load_windows
-- Reads the folded rows of some windows of keys, with one index probe for each: the first of them, about bytes_max and
-- at least one. As columns, with the places of their windows among those that were asked for, from 1, in any order.
-- Always one row.
SELECT array_agg(p.place), array_agg(p.key_hash), array_agg(p.fire_at), convert_to(string_agg(p.value, ','), 'UTF8')
  FROM (SELECT asked.place, k.key_hash, k.fire_at, k.value,
               sum(octet_length(k.value)) OVER (ORDER BY asked.place) - octet_length(k.value) AS before
          FROM unnest(%(subkeys)s, %(keys)s) WITH ORDINALITY AS asked (subkey, key, place)
         CROSS JOIN LATERAL (
               SELECT o.key_hash, o.fire_at, o.value FROM mill.keyed AS o
                WHERE o.interval_id = %(interval)s AND o.kind = 'window' AND o.namespace = ''
                  AND hashtextextended(o.key, 0) = hashtextextended(asked.key COLLATE "C", 0) AND o.key = asked.key
                  AND hashtextextended(o.subkey, 0) = hashtextextended(asked.subkey COLLATE "C", 0)
                  AND o.subkey = asked.subkey
                ORDER BY o.key_hash  -- of keyed_identity, also where the table has no statistics yet
                LIMIT 1) AS k) AS p
 WHERE p.before < %(bytes_max)s::bigint;

-- name: read_dedupe_bounds
-- Reads the latest dedupe clock, and the newest run that replaces all runs before it. Always one row.
SELECT max(clock), max(bundle) FILTER (WHERE whole) FROM mill.dedupe_runs WHERE interval_id = %(interval)s;

-- name: read_dedupe_runs
-- Reads the next runs within these bounds, oldest first: about bytes_max of them and at least one. Zero rows: no run
-- is left.
SELECT p.bundle, p.ids, p.times, p.expires_at, p.clock, p.whole
  FROM (SELECT f.*, sum(f.bytes) OVER (ORDER BY f.bundle) - f.bytes AS before
          FROM (SELECT r.*, octet_length(r.ids) + octet_length(r.times) AS bytes
                  FROM mill.dedupe_runs AS r
                 WHERE r.interval_id = %(interval)s AND r.bundle > %(after)s AND r.expires_at >= %(clock)s
                 ORDER BY r.bundle
                 LIMIT %(rows_max)s::integer) AS f) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.bundle;

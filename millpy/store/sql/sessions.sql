-- The reads of sessions that are only in the store: see stored_sessions.py.

-- name: load_sessions
-- Reads the folded sessions of some keys that intersect one of the key's spans, and the first others_max of the key that
-- have not fired, with one index scan for each key. Zero rows: there is none. The bounds of the last column of the index
-- exclude nothing: by them the planner expects few rows of a key, also if most were of one key when it last looked, and
-- does not read the whole table for each.
SELECT k.subkey, k.key, k.key_hash, k.fire_at, k.value
  FROM (SELECT s.key, range_agg(int8range(s.low, s.high)) AS spans,
               -max(9223372036854775807) - 1 AS least, max(9223372036854775807) AS most
          FROM unnest(%(keys)s, %(lows)s, %(highs)s) AS s (key, low, high)
         GROUP BY s.key) AS asked
 CROSS JOIN LATERAL (
       WITH own AS MATERIALIZED (
            SELECT s.*, asked.spans && int8range(s.starts, s.ends) AS is_touched
              FROM (SELECT w.subkey, w.key, w.key_hash, w.fire_at, w.value,
                           split_part(w.subkey, '/', 1)::bigint AS starts,
                           split_part(w.subkey, '/', 2)::bigint AS ends
                      FROM mill.keyed AS w
                     WHERE w.interval_id = %(interval)s AND w.kind = 'window' AND w.namespace = ''
                       AND hashtextextended(w.key, 0) = hashtextextended(asked.key COLLATE "C", 0)
                       AND hashtextextended(w.subkey, 0) BETWEEN asked.least AND asked.most
                       AND w.key = asked.key) AS s)
       SELECT o.* FROM own AS o WHERE o.is_touched
       UNION ALL
       (SELECT o.* FROM own AS o
         WHERE %(others_max)s::bigint > 0 AND NOT o.is_touched
           AND o.value::json ->> 'emitted' IS DISTINCT FROM 'true'
         ORDER BY o.ends, o.starts
         LIMIT %(others_max)s::bigint)) AS k;

-- name: read_ended_sessions
-- Reads the next folded sessions that end by a time, in order of their places, and those with the place of the last one.
-- Without values. Fewer rows than rows_max: no other is left.
SELECT k.subkey, k.key, k.key_hash, k.fire_at
  FROM mill.keyed AS k
 WHERE k.interval_id = %(interval)s AND k.kind = 'window'
   AND (split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint, k.key_hash)
       > (%(after_end)s::bigint, %(after_start)s::bigint, %(after_hash)s::bigint)
   AND split_part(k.subkey, '/', 2)::bigint <= %(ended_by)s::bigint
 ORDER BY split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint, k.key_hash
 FETCH FIRST (%(rows_max)s::bigint) ROWS WITH TIES;

-- name: read_unfired_sessions
-- As read_ended_sessions, of those that have not fired. With values.
SELECT k.subkey, k.key, k.key_hash, k.fire_at, k.value
  FROM mill.keyed AS k
 WHERE k.interval_id = %(interval)s AND k.kind = 'window'
   AND (split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint, k.key_hash)
       > (%(after_end)s::bigint, %(after_start)s::bigint, %(after_hash)s::bigint)
   AND split_part(k.subkey, '/', 2)::bigint <= %(ended_by)s::bigint
   AND k.value::json ->> 'emitted' IS DISTINCT FROM 'true'
 ORDER BY split_part(k.subkey, '/', 2)::bigint, split_part(k.subkey, '/', 1)::bigint, k.key_hash
 FETCH FIRST (%(rows_max)s::bigint) ROWS WITH TIES;

-- name: read_closed_ends
-- Reads when the first and the last folded session end that end by a time. Always one row.
SELECT min(ended.at), max(ended.at)
  FROM (SELECT split_part(k.subkey, '/', 2)::bigint AS at FROM mill.keyed AS k
         WHERE k.interval_id = %(interval)s AND k.kind = 'window') AS ended
 WHERE ended.at <= %(ended_by)s::bigint;

-- name: read_open_panes
-- Reads the next folded panes of windows that end after a time, and those that wait, in index order: about bytes_max of
-- them and at least one. `found` counts the rows that are left, up to rows_max. Zero rows: no row is left.
SELECT p.subkey, p.key, p.key_hash, p.fire_at, p.value, p.text_hash, p.subkey_hash, p.found
  FROM (SELECT f.*, count(*) OVER () AS found,
               sum(f.bytes) OVER (ORDER BY f.text_hash, f.subkey_hash, f.key_hash) - f.bytes AS before
          FROM (SELECT k.subkey, k.key, k.key_hash, k.fire_at, k.value, octet_length(k.value) AS bytes,
                       hashtextextended(k.key, 0) AS text_hash, hashtextextended(k.subkey, 0) AS subkey_hash
                  FROM mill.keyed AS k
                 WHERE k.interval_id = %(interval)s AND k.kind = 'window' AND k.namespace = ''
                   AND (hashtextextended(k.key, 0), hashtextextended(k.subkey, 0), k.key_hash)
                       > (%(text_hash)s::bigint, %(subkey_hash)s::bigint, %(key_hash)s::bigint)
                   AND (split_part(k.subkey, '/', 2)::bigint > %(ended_by)s::bigint OR k.value ~ '"waits": ?true')
                 ORDER BY hashtextextended(k.key, 0), hashtextextended(k.subkey, 0), k.key_hash
                 LIMIT %(rows_max)s::integer) AS f) AS p
 WHERE p.before < %(bytes_max)s::bigint
 ORDER BY p.text_hash, p.subkey_hash, p.key_hash;

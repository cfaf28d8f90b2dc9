-- name: choose_piece
-- Chooses the next contiguous documents: those after the folded bundle and after the last part that was folded, about
-- piece_bytes of them and at least one. `complete` is the last bundle that is folded with them. A null `upto`: nothing
-- is unfolded. Zero rows: the grant is stale.
SELECT i.folded_bundle, piece.upto, piece.upto_part, coalesce(piece.complete, i.folded_bundle) AS complete, piece.bytes, piece.slots
  FROM mill.intervals AS i
  LEFT JOIN LATERAL (
       SELECT max(d.bundle) AS upto, (array_agg(d.part ORDER BY d.bundle DESC, d.part DESC))[1] AS upto_part,
              max(d.bundle) FILTER (WHERE d.part = d.last_part) AS complete,
              sum(d.bytes) AS bytes, array_agg(DISTINCT d.slot) AS slots
         FROM (SELECT u.bundle, u.part, u.slot, u.bytes, max(u.part) OVER (PARTITION BY u.bundle) AS last_part,
                      sum(u.bytes) OVER (ORDER BY u.bundle, u.part) - u.bytes AS before
                 FROM mill.deltas AS u
                WHERE u.interval_id = i.interval_id AND u.bundle > i.folded_bundle
                  AND (u.bundle, u.part) > (%(after)s::bigint, %(after_part)s::integer)) AS d
        WHERE d.before < %(piece_bytes)s::bigint) AS piece ON true
 WHERE i.interval_id = %(interval)s AND i.sequencer = %(sequencer)s;

-- name: hold_off_folds
-- Waits for what changes folded rows, of any graph; later folds wait for this transaction, and commits do not. Who may only
-- read has no lock that this waits for.
LOCK TABLE mill.keyed IN SHARE ROW EXCLUSIVE MODE;

-- name: fold_piece
-- Folds the documents of (after, upto] into rows, newest per key. Zero rows: there were only tombstones.
-- Each document is parsed into its parts once: reading a member of the json for each row would parse it every time.
WITH parts AS MATERIALIZED (
    SELECT d.bundle, e.*
      FROM mill.deltas AS d
     CROSS JOIN LATERAL json_to_recordset(d.document) AS e
           (kind text, namespace text, hash json, key json, subkey json, value json, fire_at json)
     WHERE d.slot = ANY (%(slots)s::smallint[])  -- known at planning time: other slots are not even locked
       AND d.interval_id = %(interval)s AND d.bundle > %(folded)s AND d.bundle <= %(upto)s
       AND (d.bundle, d.part) > (%(after)s::bigint, %(after_part)s::integer)
       AND (d.bundle, d.part) <= (%(upto)s::bigint, %(upto_part)s::integer)
), changes AS MATERIALIZED (
    SELECT p.bundle, p.kind, p.namespace, c.key::text AS key, c.subkey,
           hashtextextended(c.key::text COLLATE "C", 0) AS text_hash, c.key_hash::bigint AS key_hash, c.fire_at::bigint AS fire_at, c.value
      FROM parts AS p
     CROSS JOIN LATERAL ROWS FROM (
           json_array_elements_text(p.hash), json_array_elements(p.key), json_array_elements_text(p.subkey),
           json_array_elements(p.value), json_array_elements_text(p.fire_at)) AS c (key_hash, key, subkey, value, fire_at)
), newest AS MATERIALIZED (
    -- The hash comes first: it is cheap to compare and nearly always decides. Rows are inserted in index order.
    SELECT DISTINCT ON (text_hash, key COLLATE "C", kind COLLATE "C", namespace COLLATE "C", subkey COLLATE "C") *
      FROM changes
     ORDER BY text_hash, key COLLATE "C", kind COLLATE "C", namespace COLLATE "C", subkey COLLATE "C", bundle DESC
), gone AS (
    -- One index probe for each tombstone, whatever number of tombstones the planner expects.
    DELETE FROM mill.keyed AS k
     WHERE k.ctid = ANY (ARRAY(
           SELECT found.place
             FROM newest AS n
            CROSS JOIN LATERAL (
                  SELECT o.ctid AS place FROM mill.keyed AS o
                   WHERE o.interval_id = %(interval)s AND hashtextextended(o.key, 0) = n.text_hash
                     AND o.kind = n.kind AND o.namespace = n.namespace
                     AND hashtextextended(o.subkey, 0) = hashtextextended(n.subkey COLLATE "C", 0)
                     AND o.key_hash = n.key_hash AND o.bundle < n.bundle
                   LIMIT 1) AS found
            WHERE n.value::text = 'null'))
)
INSERT INTO mill.keyed AS k (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT %(interval)s, kind, namespace, key, subkey, key_hash, fire_at, bundle, (value -> 0)::text
  FROM newest
 WHERE value::text <> 'null'
ON CONFLICT (interval_id, hashtextextended(key, 0), kind, namespace, hashtextextended(subkey, 0), key_hash)
DO UPDATE SET value = excluded.value, fire_at = excluded.fire_at, bundle = excluded.bundle
 WHERE k.bundle < excluded.bundle;

-- name: end_fold
-- Raises MW001 when the grant is stale, which undoes the whole piece. Always one row.
SELECT mill.end_fold(%(interval)s, %(sequencer)s, %(folded)s, %(complete)s);

-- name: delete_windows
-- Deletes rows of windows that have expired, up to rows_max, and counts them. Zero rows: the grant is stale.
WITH owned AS MATERIALIZED (
    SELECT FROM mill.intervals AS i WHERE i.interval_id = %(interval)s AND i.sequencer = %(sequencer)s
), gone AS (
    DELETE FROM mill.keyed AS k
     WHERE k.ctid = ANY (ARRAY(
           SELECT found.place
             FROM owned
            CROSS JOIN unnest(%(subkeys)s) AS e (subkey)
            CROSS JOIN LATERAL (
                  SELECT o.ctid AS place FROM mill.keyed AS o
                   WHERE o.interval_id = %(interval)s AND o.kind = 'window'
                     AND split_part(o.subkey, '/', 2)::bigint = split_part(e.subkey, '/', 2)::bigint
                     AND split_part(o.subkey, '/', 1)::bigint = split_part(e.subkey, '/', 1)::bigint
                   -- This order makes keyed_windows the cheapest index also where the table has no statistics yet; the
                   -- others would look at all windows of the interval for each subkey.
                   ORDER BY o.key_hash) AS found
            LIMIT %(rows_max)s::integer))
    RETURNING 1)
SELECT (SELECT count(*) FROM gone) FROM owned;

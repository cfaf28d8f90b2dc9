-- name: choose_piece
-- The next contiguous documents after the folded bundle, of about piece_bytes, at least one.
-- Zero rows: the grant is stale; a null end: nothing is unfolded.
SELECT i.folded_bundle, piece.bundle AS upto, piece.bytes, piece.slots
  FROM mill.intervals AS i
  LEFT JOIN LATERAL (
       SELECT max(d.bundle) AS bundle, sum(d.bytes) AS bytes, array_agg(DISTINCT d.slot) AS slots
         FROM (SELECT u.bundle, u.slot, u.bytes, sum(u.bytes) OVER (ORDER BY u.bundle) - u.bytes AS before
                 FROM mill.deltas AS u
                WHERE u.interval_id = i.interval_id AND u.bundle > i.folded_bundle) AS d
        WHERE d.before < %(piece_bytes)s::bigint) AS piece ON true
 WHERE i.interval_id = %(interval)s AND i.sequencer = %(sequencer)s;

-- name: fold_piece
-- Brings the documents of (folded, upto] into rows, newest per key. Zero rows: only tombstones.
-- A part's kind and namespace are read once a part: read once a row, each would parse its document again.
WITH parts AS MATERIALIZED (
    SELECT d.bundle, e ->> 'kind' AS kind, e ->> 'namespace' AS namespace, e AS part
      FROM mill.deltas AS d
     CROSS JOIN LATERAL json_array_elements(d.document) AS e
     WHERE d.slot = ANY (%(slots)s::smallint[])  -- known when it is planned: other slots are not even locked
       AND d.interval_id = %(interval)s AND d.bundle > %(folded)s AND d.bundle <= %(upto)s
), changes AS MATERIALIZED (
    SELECT p.bundle, p.kind, p.namespace, c.key::text AS key, c.subkey,
           c.key_hash::bigint AS key_hash, c.fire_at::bigint AS fire_at, c.value
      FROM parts AS p
     CROSS JOIN LATERAL ROWS FROM (
           json_array_elements_text(p.part -> 'hash'), json_array_elements(p.part -> 'key'),
           json_array_elements_text(p.part -> 'subkey'), json_array_elements(p.part -> 'value'),
           json_array_elements_text(p.part -> 'fire_at')) AS c (key_hash, key, subkey, value, fire_at)
), newest AS MATERIALIZED (
    SELECT DISTINCT ON (kind COLLATE "C", namespace COLLATE "C", key COLLATE "C", subkey COLLATE "C") *
      FROM changes
     ORDER BY kind COLLATE "C", namespace COLLATE "C", key COLLATE "C", subkey COLLATE "C", bundle DESC
), gone AS (
    DELETE FROM mill.keyed AS k USING newest AS n
     WHERE n.value::text = 'null'
       AND k.interval_id = %(interval)s AND k.kind = n.kind
       AND hashtextextended(k.key, 0) = hashtextextended(n.key COLLATE "C", 0)
       AND k.namespace = n.namespace
       AND hashtextextended(k.subkey, 0) = hashtextextended(n.subkey COLLATE "C", 0)
       AND k.key_hash = n.key_hash AND k.bundle < n.bundle
)
INSERT INTO mill.keyed AS k (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT %(interval)s, kind, namespace, key, subkey, key_hash, fire_at, bundle, value -> 0
  FROM newest
 WHERE value::text <> 'null'
ON CONFLICT (interval_id, kind, hashtextextended(key, 0), namespace, hashtextextended(subkey, 0), key_hash)
DO UPDATE SET value = excluded.value, fire_at = excluded.fire_at, bundle = excluded.bundle
 WHERE k.bundle < excluded.bundle;

-- name: end_fold
-- Raises MW001 when the grant is stale; then the whole piece is undone. Always one row.
SELECT mill.end_fold(%(interval)s, %(sequencer)s, %(folded)s, %(upto)s);

-- The machinery of millpy: who owns what, how far everything is, and the logs.
-- Instants are bigint µs since the epoch, UTC; -2^62 and 2^62 are the beginning and the end.

-- One row for each generation of a graph. The generation that goes by the graph's own name is the current one; the
-- others are beside it, as NAME_GENERATION. A name is also the schema of the result tables.
CREATE TABLE mill.graphs (
    graph_id    integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    family      text NOT NULL,
    generation  integer NOT NULL CHECK (generation > 0),
    version     integer NOT NULL DEFAULT 1,
    fingerprint text NOT NULL,
    description jsonb NOT NULL,
    deployed_at timestamptz NOT NULL DEFAULT now(),
    -- What names at brokers are made from: whoever could guess a session's name could end it. Not for readers.
    secret      uuid NOT NULL DEFAULT gen_random_uuid(),
    UNIQUE (family, generation),
    CHECK (name IN (family, family || '_' || generation))
);

CREATE TABLE mill.computations (
    computation_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id       integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    name           text NOT NULL,
    kind           text NOT NULL CHECK (kind IN ('injector', 'stage')),
    place          integer NOT NULL,  -- in topological order
    UNIQUE (graph_id, name)
);

CREATE TABLE mill.schemas (
    schema_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    encoded   bytea NOT NULL,  -- Arrow IPC schema message
    digest    text NOT NULL UNIQUE
);

CREATE TABLE mill.streams (
    stream_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id    integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    name        text NOT NULL,
    producer_id integer NOT NULL REFERENCES mill.computations ON DELETE CASCADE,
    schema_id   integer NOT NULL REFERENCES mill.schemas,
    UNIQUE (graph_id, name)
);

CREATE TABLE mill.subscriptions (
    subscription_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id        integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    stream_id       integer NOT NULL REFERENCES mill.streams ON DELETE CASCADE,
    consumer_id     integer NOT NULL REFERENCES mill.computations ON DELETE CASCADE,
    input           integer NOT NULL,
    key_fields      text[] NOT NULL,
    UNIQUE (stream_id, consumer_id, input)
);

CREATE TABLE mill.result_tables (
    table_id            integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id            integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    name                text NOT NULL,
    kind                text NOT NULL CHECK (kind IN ('windowed', 'records')),
    computation_id      integer NOT NULL REFERENCES mill.computations ON DELETE CASCADE,
    stream_id           integer NOT NULL REFERENCES mill.streams ON DELETE CASCADE,
    key_columns         jsonb NOT NULL,    -- [[name, sql type, nullable], …]
    value_columns       jsonb NOT NULL,
    allowed_lateness_us bigint NOT NULL,
    UNIQUE (graph_id, name)
);

-- Who owns, who writes, who reads; made by `millpy migrate --roles`, else empty: then everybody is who migrated.
CREATE TABLE mill.roles (
    alone  boolean PRIMARY KEY DEFAULT true CHECK (alone),
    owner  text NOT NULL,
    worker text NOT NULL,
    reader text NOT NULL
);

-- A live process. The recorded backend is its commit connection: an expired owner that is frozen between
-- fence and COMMIT is freed by terminating it.
CREATE TABLE mill.workers (
    worker_id      uuid PRIMARY KEY,
    graph_id       integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    graph_version  integer NOT NULL,  -- that it knows: it owns nothing of another
    computations   text[] NOT NULL,  -- those it takes; empty for all
    host           text NOT NULL,
    pid            integer NOT NULL,
    backend_pid    integer,
    backend_start  timestamptz,
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_deadline timestamptz NOT NULL,
    lease_s        double precision NOT NULL DEFAULT 5
) WITH (fillfactor = 50);

-- The checkpoint header. Fixed width and no index on a changing column: a commit is one HOT update that is
-- fence and progress at once.
CREATE TABLE mill.intervals (
    interval_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id         integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    computation_id   integer NOT NULL REFERENCES mill.computations ON DELETE CASCADE,
    place            integer NOT NULL,  -- among its computation's intervals
    key_lo           bigint CHECK (key_lo >= 0),
    key_hi           bigint CHECK (key_hi <= 4294967296),
    source_partition text NOT NULL DEFAULT '',
    joined           boolean NOT NULL DEFAULT false,  -- a source partition that was added to a deployed source
    worker_id        uuid,
    sequencer        bigint NOT NULL DEFAULT 0,
    graph_version    integer NOT NULL,
    bundle           bigint NOT NULL DEFAULT 0,
    folded_bundle    bigint NOT NULL DEFAULT 0,
    input_watermark  bigint NOT NULL DEFAULT -4611686018427387904,
    low_watermark    bigint NOT NULL DEFAULT -4611686018427387904,
    oldest_work      bigint NOT NULL DEFAULT 4611686018427387904,
    processing_floor bigint NOT NULL DEFAULT -4611686018427387904,
    UNIQUE (computation_id, place),
    CHECK (folded_bundle <= bundle),
    CHECK (key_lo < key_hi)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- seq s says: all segments of this producer up to s, in every subscription of this consumer, are consumed (I3).
-- One row for every pair that is joined by a subscription, made at deployment.
CREATE TABLE mill.cursors (
    consumer  bigint NOT NULL,
    producer  bigint NOT NULL,
    seq       bigint NOT NULL DEFAULT 0,
    watermark bigint NOT NULL DEFAULT -4611686018427387904,
    PRIMARY KEY (consumer, producer)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX cursors_producer ON mill.cursors (producer);

-- Survives the segments themselves, so that a new owner can go on with the chain of previous_seq.
CREATE TABLE mill.last_segments (
    producer        bigint NOT NULL,
    subscription_id bigint NOT NULL,
    seq             bigint NOT NULL,
    PRIMARY KEY (producer, subscription_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- The three rings. Each is cut into sixteen slots; a slot is emptied by TRUNCATE.
CREATE TABLE mill.segments (
    slot            smallint NOT NULL,
    subscription_id bigint NOT NULL,
    producer        bigint NOT NULL,
    seq             bigint NOT NULL,
    previous_seq    bigint NOT NULL,
    watermark       bigint NOT NULL,
    records         integer[] NOT NULL,  -- per slice, 0 for none
    ends            bigint[] NOT NULL,   -- per slice, where it ends in the payload
    checksums       bigint[] NOT NULL,
    event_time_lo   bigint NOT NULL,
    event_time_hi   bigint NOT NULL,
    payload         bytea NOT NULL,
    PRIMARY KEY (subscription_id, producer, seq, slot),
    CHECK (previous_seq < seq)
) PARTITION BY LIST (slot);
ALTER TABLE mill.segments ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE TABLE mill.deltas (
    slot        smallint NOT NULL,
    interval_id bigint NOT NULL,
    bundle      bigint NOT NULL,
    part        integer NOT NULL,  -- of a bundle that changes more than one document holds; from 0
    bytes       integer NOT NULL,
    document    json NOT NULL,
    PRIMARY KEY (interval_id, bundle, part, slot)
) PARTITION BY LIST (slot);
ALTER TABLE mill.deltas ALTER COLUMN document SET STORAGE EXTERNAL;

CREATE TABLE mill.dedupe_runs (
    slot        smallint NOT NULL,
    interval_id bigint NOT NULL,
    bundle      bigint NOT NULL,
    expires_at  bigint NOT NULL,
    clock       bigint NOT NULL,
    ids         bytea NOT NULL,
    times       bytea NOT NULL,
    whole       boolean NOT NULL DEFAULT false,  -- holds all ids that matter: those of earlier bundles do no more
    PRIMARY KEY (interval_id, bundle, slot)
) PARTITION BY LIST (slot);
ALTER TABLE mill.dedupe_runs ALTER COLUMN ids SET STORAGE EXTERNAL, ALTER COLUMN times SET STORAGE EXTERNAL;

-- state: 'current' takes writes, 'filled' is still read, 'free' is empty.
CREATE TABLE mill.epochs (
    ring       text NOT NULL CHECK (ring IN ('segments', 'deltas', 'dedupe_runs')),
    slot       smallint NOT NULL CHECK (slot BETWEEN 0 AND 15),
    state      text NOT NULL CHECK (state IN ('current', 'filled', 'free')),
    started_at timestamptz,
    PRIMARY KEY (ring, slot)
) WITH (fillfactor = 50);

DO $$
DECLARE
    ring_name text;
BEGIN
    FOREACH ring_name IN ARRAY ARRAY['segments', 'deltas', 'dedupe_runs'] LOOP
        FOR slot_number IN 0..15 LOOP
            EXECUTE format('CREATE TABLE mill.%I PARTITION OF mill.%I FOR VALUES IN (%s)',
                           ring_name || '_' || slot_number, ring_name, slot_number);
            INSERT INTO mill.epochs (ring, slot, state, started_at)
            VALUES (ring_name, slot_number, CASE WHEN slot_number = 0 THEN 'current' ELSE 'free' END,
                    CASE WHEN slot_number = 0 THEN clock_timestamp() END);
        END LOOP;
    END LOOP;
END $$;

-- Folded rows. Keys and subkeys can be long, so the unique index holds their hashes (64 bits beside the 32 of
-- key_hash); text is compared byte by byte. An owner reads a kind piece by piece in the order of the index.
CREATE TABLE mill.keyed (
    interval_id bigint NOT NULL,
    kind        text COLLATE "C" NOT NULL,
    namespace   text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    subkey      text COLLATE "C" NOT NULL,
    key_hash    bigint NOT NULL,
    fire_at     bigint NOT NULL,
    bundle      bigint NOT NULL,
    value       text COLLATE "C" NOT NULL  -- JSON
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX keyed_identity ON mill.keyed (
    interval_id, kind, hashtextextended(key, 0), namespace, hashtextextended(subkey, 0), key_hash
);
-- A publication of all tables has to name the row that is changed, and an index of expressions cannot. It costs nothing
-- while nothing is published; text, because json has no equality by which a subscriber would find the row.
ALTER TABLE mill.keyed REPLICA IDENTITY FULL;
-- Timers, windows, positions and counters are few beside state; people ask for them by kind.
CREATE INDEX keyed_others ON mill.keyed (kind, interval_id) WHERE kind <> 'state';

CREATE TABLE mill.dead_letters (
    dead_letter_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    interval_id      bigint NOT NULL,
    bundle           bigint NOT NULL,
    stream           text NOT NULL,
    computation      text NOT NULL,
    input            integer NOT NULL,
    reason           text NOT NULL,
    detail           text NOT NULL,
    traceback        text NOT NULL,
    source_position  text NOT NULL,
    key              text,
    event_time       bigint,
    wire             text NOT NULL,  -- how the payload is read again; empty for a record as JSON
    dedupe_id        bytea,
    payload          bytea NOT NULL,
    corrected        bytea,  -- what a person wants read instead
    attempts         integer NOT NULL DEFAULT 0,  -- replays that ended here again
    state            text NOT NULL DEFAULT 'set_aside' CHECK (state IN ('set_aside', 'requested', 'replayed', 'discarded')),
    state_at         timestamptz NOT NULL DEFAULT now(),
    dead_lettered_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX dead_letters_requested ON mill.dead_letters (interval_id, dead_letter_id) WHERE state = 'requested';
CREATE INDEX dead_letters_age ON mill.dead_letters (dead_lettered_at);
CREATE INDEX dead_letters_settled ON mill.dead_letters (state_at) WHERE state IN ('replayed', 'discarded');

CREATE TABLE mill.late_records (
    late_record_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    interval_id    bigint NOT NULL,
    bundle         bigint NOT NULL,
    stream         text NOT NULL,
    computation    text NOT NULL,
    input          integer NOT NULL,
    key            text NOT NULL,
    event_time     bigint NOT NULL,
    watermark      bigint NOT NULL,
    window_start   bigint,
    window_end     bigint,
    whole          boolean NOT NULL,  -- stands for a record that missed all of its windows
    payload        bytea NOT NULL,
    attempts       integer NOT NULL DEFAULT 0,
    state          text NOT NULL DEFAULT 'set_aside' CHECK (state IN ('set_aside', 'requested', 'replayed', 'discarded')),
    state_at       timestamptz NOT NULL DEFAULT now(),
    recorded_at    timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX late_records_requested ON mill.late_records (interval_id, late_record_id) WHERE state = 'requested';
CREATE INDEX late_records_age ON mill.late_records (recorded_at);
CREATE INDEX late_records_settled ON mill.late_records (state_at) WHERE state IN ('replayed', 'discarded');

-- Source partitions that stand still until a person resumes them.
CREATE TABLE mill.pauses (
    interval_id bigint PRIMARY KEY,
    bundle      bigint NOT NULL,  -- the last one before
    reason      text NOT NULL,
    paused_at   timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE mill.outbox (
    interval_id bigint NOT NULL,
    target      text NOT NULL,
    sequence    bigint NOT NULL,
    key         text,
    payload     bytea NOT NULL,
    written_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (interval_id, target, sequence)
);

-- Which source partitions are proven idle, as their owners last said: for `max_skew`, and nothing else.
CREATE TABLE mill.source_states (
    interval_id bigint PRIMARY KEY,
    quiet       boolean NOT NULL
);

-- Parked keys that people let go on; the commit that does it deletes the row.
CREATE TABLE mill.releases (
    release_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    interval_id  bigint NOT NULL,
    key          text NOT NULL,
    ticket       bigint NOT NULL,
    discards     boolean NOT NULL,
    requested_by text NOT NULL DEFAULT session_user,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE mill.events (
    event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    kind     text NOT NULL,
    detail   jsonb NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX events_at ON mill.events (graph_id, at);
CREATE INDEX events_age ON mill.events (at);

-- How many dead letters, late records and events were removed because of their age; reason is an event's kind.
CREATE TABLE mill.expired (
    graph_id    integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    pile        text NOT NULL CHECK (pile IN ('dead_letters', 'late_records', 'events')),
    stream      text NOT NULL,
    computation text NOT NULL,
    reason      text NOT NULL,
    count       bigint NOT NULL,
    PRIMARY KEY (graph_id, pile, stream, computation, reason)
);

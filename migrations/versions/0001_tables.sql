-- The tables of the engine: ownership, progress, and the logs.
-- Instants are bigint µs since the epoch, UTC; -2^62 is the beginning of time, 2^62 the end.

-- One row for each generation of a graph. The current generation has the graph's own name; the others are called
-- NAME_GENERATION. A name is also the schema of the result tables.
CREATE TABLE mill.graphs (
    graph_id    integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    family      text NOT NULL,
    generation  integer NOT NULL CHECK (generation > 0),
    version     integer NOT NULL DEFAULT 1,
    description jsonb NOT NULL,
    deployed_at timestamptz NOT NULL DEFAULT now(),
    -- Names at brokers are derived from it, because a client that guesses a session's name can end the session. Readers
    -- cannot see it.
    secret      uuid NOT NULL DEFAULT gen_random_uuid(),
    -- What computes the generation: a worker registers and claims only for its own. Spark hands over to workers, once.
    engine      text NOT NULL DEFAULT 'workers' CHECK (engine IN ('workers', 'spark')),
    UNIQUE (family, generation),
    CHECK (name IN (family, family || '_' || generation))
);

CREATE TABLE mill.computations (
    computation_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id       integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    name           text NOT NULL,
    kind           text NOT NULL CHECK (kind IN ('injector', 'stage', 'archive', 'sink')),
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
    history             text NOT NULL,  -- the mode of its windows, if its panes and retractions are kept; otherwise ''
    retention_us        bigint CHECK (retention_us > 0),  -- null for a table without partitions, which keeps its rows
    partition_us        bigint CHECK (partition_us > 0),  -- the length of a new partition
    dropped_to          bigint,  -- partitions up to this time were dropped; null if none was
    copied_from         integer,  -- the generation from which it gets the rows of closed windows; null if from none
    copied_until        bigint,   -- of windows that end by this time
    copied_to           bigint,   -- the copy has come this far
    UNIQUE (graph_id, name),
    CHECK ((retention_us IS NULL) = (partition_us IS NULL))
);

-- The partitions of result tables with a retention, and of their histories: the rows whose time is in
-- [range_lo, range_hi). They are tables in this schema, so that people do not see them beside their result tables.
-- The first partition may begin at -2^62, and the last one end at 2^63 - 1.
CREATE TABLE mill.partitions (
    table_id integer NOT NULL REFERENCES mill.result_tables ON DELETE CASCADE,
    range_lo bigint NOT NULL,
    range_hi bigint NOT NULL,
    name     text NOT NULL UNIQUE,
    PRIMARY KEY (table_id, range_lo),
    CHECK (range_lo < range_hi)
);

-- The roles owner, worker and reader, which `millpy migrate --roles` creates: one row. Without a row, every process
-- connects as the role that migrated.
CREATE TABLE mill.roles (
    alone  boolean PRIMARY KEY DEFAULT true CHECK (alone),
    owner  text NOT NULL,
    worker text NOT NULL,
    reader text NOT NULL
);

-- The worker processes. The recorded backend is that of the commit connection: when an expired owner is frozen between
-- fence and COMMIT, its successor terminates that backend.
CREATE TABLE mill.workers (
    worker_id      uuid PRIMARY KEY,
    graph_id       integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    graph_version  integer NOT NULL,  -- the version that the worker knows; it owns intervals of no other version
    computations   text[] NOT NULL,  -- names of the computations that the worker runs; empty for all
    engine         text NOT NULL DEFAULT 'workers',
    host           text NOT NULL,
    pid            integer NOT NULL,
    backend_pid    integer,
    backend_start  timestamptz,
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_deadline timestamptz NOT NULL,
    lease_s        double precision NOT NULL DEFAULT 5,
    -- What the worker reports with each renewal of its lease: NULL before the first one, and where it is not known.
    memory_bytes   bigint,
    turn_p50_s     double precision,  -- of the last minute, as all of these
    turn_p99_s     double precision,
    commit_p50_s   double precision,
    commit_p99_s   double precision
) WITH (fillfactor = 50);

-- Requests that workers drain. A row of its own, and not a column of the worker: a transaction that hangs after its
-- request must not keep the worker from renewing its lease.
CREATE TABLE mill.drain_requests (
    worker_id    uuid PRIMARY KEY REFERENCES mill.workers ON DELETE CASCADE,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The checkpoint headers. A header has a fixed width and no index on a changing column, so a commit makes one HOT
-- update, which is both fence and progress.
CREATE TABLE mill.intervals (
    interval_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id         integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    computation_id   integer NOT NULL REFERENCES mill.computations ON DELETE CASCADE,
    place            integer NOT NULL,  -- position among the intervals of its computation, from 0
    key_lo           bigint CHECK (key_lo >= 0),
    key_hi           bigint CHECK (key_hi <= 4294967296),
    source_partition text NOT NULL DEFAULT '',
    joined           boolean NOT NULL DEFAULT false,  -- a source partition that joined a deployed source
    worker_id        uuid,
    sequencer        bigint NOT NULL DEFAULT 0,
    graph_version    integer NOT NULL,
    bundle           bigint NOT NULL DEFAULT 0,
    folded_bundle    bigint NOT NULL DEFAULT 0,
    input_watermark  bigint NOT NULL DEFAULT -4611686018427387904,
    low_watermark    bigint NOT NULL DEFAULT -4611686018427387904,
    oldest_work      bigint NOT NULL DEFAULT 4611686018427387904,
    processing_floor bigint NOT NULL DEFAULT -4611686018427387904,
    -- Set when the lateness or the dedupe horizon changes: windows that end by it are over, ids last seen before it are
    -- forgotten.
    horizon_floor    bigint NOT NULL DEFAULT -4611686018427387904,
    UNIQUE (computation_id, place),
    CHECK (folded_bundle <= bundle),
    CHECK (key_lo < key_hi)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- A seq of s means that the consumer has consumed all segments of the producer up to s, in every subscription (I3).
-- Deployment adds one row for each pair of intervals that a subscription joins.
CREATE TABLE mill.cursors (
    consumer  bigint NOT NULL,
    producer  bigint NOT NULL,
    seq       bigint NOT NULL DEFAULT 0,
    watermark bigint NOT NULL DEFAULT -4611686018427387904,
    PRIMARY KEY (consumer, producer)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX cursors_producer ON mill.cursors (producer);

-- The last segment of each producer and subscription. It outlives the segment, so that a new owner can continue the
-- chain of previous_seq.
CREATE TABLE mill.last_segments (
    producer        bigint NOT NULL,
    subscription_id bigint NOT NULL,
    seq             bigint NOT NULL,
    PRIMARY KEY (producer, subscription_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- The three rings. Each has sixteen slots; TRUNCATE empties a slot.
CREATE TABLE mill.segments (
    slot            smallint NOT NULL,
    subscription_id bigint NOT NULL,
    producer        bigint NOT NULL,
    seq             bigint NOT NULL,
    previous_seq    bigint NOT NULL,
    watermark       bigint NOT NULL,
    records         integer[] NOT NULL,  -- per slice; 0 when the slice is empty
    ends            bigint[] NOT NULL,   -- per slice: the byte of the payload at which it ends (exclusive)
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
    part        integer NOT NULL,  -- number of the document within its bundle, from 0
    bytes       integer NOT NULL,
    document    json NOT NULL,
    -- All counters of the interval as of this bundle, counter -> subkey -> count, whether the document has them or not: a
    -- reader needs only those of the newest bundle. NULL if the writer did not know all of them.
    counters    json,
    parks       boolean NOT NULL,  -- whether the bundle changes parked keys
    PRIMARY KEY (interval_id, bundle, part, slot)
) PARTITION BY LIST (slot);
ALTER TABLE mill.deltas ALTER COLUMN document SET STORAGE EXTERNAL;
-- The few documents that a reader of counters, or of parked keys, has to look through.
CREATE INDEX deltas_partial ON mill.deltas (interval_id, bundle) WHERE counters IS NULL;
CREATE INDEX deltas_parking ON mill.deltas (interval_id, bundle) WHERE parks;

CREATE TABLE mill.dedupe_runs (
    slot        smallint NOT NULL,
    interval_id bigint NOT NULL,
    bundle      bigint NOT NULL,
    expires_at  bigint NOT NULL,
    clock       bigint NOT NULL,
    ids         bytea NOT NULL,
    times       bytea NOT NULL,
    whole       boolean NOT NULL DEFAULT false,  -- replaces the runs of all earlier bundles
    PRIMARY KEY (interval_id, bundle, slot)
) PARTITION BY LIST (slot);
ALTER TABLE mill.dedupe_runs ALTER COLUMN ids SET STORAGE EXTERNAL, ALTER COLUMN times SET STORAGE EXTERNAL;
-- They are rare: a worker that asks which slots are needed reads no others.
CREATE INDEX dedupe_runs_whole ON mill.dedupe_runs (interval_id, bundle) WHERE whole;

-- A 'current' slot takes writes, a 'filled' slot is still read, a 'free' slot is empty.
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

-- Folded rows. Keys and subkeys can be long, so the unique index holds their hashes (64 bits in addition to the 32 of
-- key_hash). Text is compared byte by byte. An owner reads each kind piece by piece, in index order.
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
-- A publication of all tables needs a replica identity, and an index on expressions cannot serve as one. FULL costs
-- nothing without a publication. `value` is text because json has no equality, by which a subscriber finds the row.
ALTER TABLE mill.keyed REPLICA IDENTITY FULL;
-- Timers, windows, positions and counters are few compared with state; views read them by kind.
CREATE INDEX keyed_others ON mill.keyed (kind, interval_id) WHERE kind <> 'state';
-- A new owner finds the windows that wait in the store, an expiry the rows of one, and a watermark the sessions that it
-- reaches, without a look at others.
CREATE INDEX keyed_windows ON mill.keyed (
    interval_id, (split_part(subkey, '/', 2)::bigint), (split_part(subkey, '/', 1)::bigint), key_hash
) WHERE kind = 'window';

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
    wire             text NOT NULL,  -- format of the payload; empty for a record stored as JSON
    dedupe_id        bytea,
    payload          bytea NOT NULL,
    retracts         boolean NOT NULL DEFAULT false,  -- a retraction of an equal record before it
    corrected        bytea,  -- an operator's replacement for the payload
    attempts         integer NOT NULL DEFAULT 0,  -- failed replays
    state            text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'requested', 'replayed', 'discarded')),
    state_at         timestamptz NOT NULL DEFAULT now(),
    dead_lettered_at timestamptz NOT NULL DEFAULT now(),
    into_window      boolean NOT NULL DEFAULT false,  -- the request is to add it to windows that it is too late for
    requested_by     text NOT NULL DEFAULT '',
    why              text NOT NULL DEFAULT ''  -- in the words of the operator
);
CREATE INDEX dead_letters_requested ON mill.dead_letters (interval_id, dead_letter_id) WHERE state = 'requested';
CREATE INDEX dead_letters_age ON mill.dead_letters (dead_lettered_at);
CREATE INDEX dead_letters_settled ON mill.dead_letters (state_at) WHERE state IN ('replayed', 'discarded');

-- The records that replayed dead letters became, on the way to their consumers: where one comes too late, it is added to
-- its finished window.
CREATE TABLE mill.expected_records (
    expected_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    dead_letter_id bigint NOT NULL REFERENCES mill.dead_letters ON DELETE CASCADE,
    bundle         bigint NOT NULL,  -- of the interval of the dead letter, which made the record
    computation    text NOT NULL,
    input          integer NOT NULL,
    event_time     bigint NOT NULL,
    digest         bytea NOT NULL  -- SHA-256 of the payload that a late record of it has
);
CREATE INDEX expected_records_letter ON mill.expected_records (dead_letter_id);
CREATE INDEX expected_records_digest ON mill.expected_records (digest);  -- each commit with late records asks for them

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
    whole          boolean NOT NULL,  -- true for one row of each record that missed all of its windows
    payload        bytea NOT NULL,
    retracts       boolean NOT NULL DEFAULT false,
    attempts       integer NOT NULL DEFAULT 0,
    state          text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'requested', 'replayed', 'discarded')),
    state_at       timestamptz NOT NULL DEFAULT now(),
    recorded_at    timestamptz NOT NULL DEFAULT now(),
    into_window    boolean NOT NULL DEFAULT false,  -- the request is to add it to its finished window
    requested_by   text NOT NULL DEFAULT '',
    why            text NOT NULL DEFAULT '',  -- in the words of the operator
    detail         text NOT NULL DEFAULT '',  -- why the last such request failed
    recomputed     jsonb,  -- the window by an archive: {"values": [accumulator, …], "row": the row that they give}
    dead_letter_id bigint,  -- the dead letter that was replayed into the window; NULL for another record
    expected_id    bigint
);
CREATE INDEX late_records_expected ON mill.late_records (expected_id) WHERE expected_id IS NOT NULL;
CREATE INDEX late_records_requested ON mill.late_records (interval_id, late_record_id) WHERE state = 'requested';
CREATE INDEX late_records_age ON mill.late_records (recorded_at);
CREATE INDEX late_records_settled ON mill.late_records (state_at) WHERE state IN ('replayed', 'discarded');

-- Rows of finished windows that operators changed: by a late record, which the owner adds in a turn, or by hand.
CREATE TABLE mill.corrections (
    correction_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph_id       integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    table_name     text NOT NULL,
    key            text NOT NULL,
    window_start   bigint NOT NULL,
    window_end     bigint NOT NULL,
    late_record_id bigint,  -- NULL if an operator gave the values
    dead_letter_id bigint,  -- whose replay the late record is; NULL for another one
    recomputed     boolean NOT NULL DEFAULT false,  -- from an archive, since the row does not tell enough
    bundle         bigint NOT NULL DEFAULT 0,
    old_row        jsonb,  -- NULL if there was no row
    new_row        jsonb,  -- NULL if there is no row any more
    why            text NOT NULL,
    requested_by   text NOT NULL,
    corrected_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX corrections_age ON mill.corrections (corrected_at);
CREATE INDEX corrections_record ON mill.corrections (late_record_id);

-- Windows whose corrections were forgotten, as old as events may become: an audit and a repair still leave them out. At
-- most one for each row that is kept.
CREATE TABLE mill.corrected_windows (
    graph_id     integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    table_name   text NOT NULL,
    key          text NOT NULL,
    window_start bigint NOT NULL,
    window_end   bigint NOT NULL,
    PRIMARY KEY (graph_id, table_name, key, window_start, window_end)
);

-- Source partitions that are paused until an operator resumes them.
CREATE TABLE mill.pauses (
    interval_id bigint PRIMARY KEY,
    bundle      bigint NOT NULL,  -- the last bundle before the pause
    reason      text NOT NULL,
    paused_at   timestamptz NOT NULL DEFAULT now()
);

-- Whether each source partition is proven idle or paused, as its owner last reported. Only `max_skew` uses this.
CREATE TABLE mill.source_states (
    interval_id bigint PRIMARY KEY,
    quiet       boolean NOT NULL
);

-- Requests to release parked keys. The commit that releases a key deletes its row.
CREATE TABLE mill.releases (
    release_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    interval_id  bigint NOT NULL,
    key          text NOT NULL,
    ticket       bigint NOT NULL,
    discards     boolean NOT NULL,
    requested_by text NOT NULL DEFAULT session_user,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX releases_interval ON mill.releases (interval_id, release_id);

-- The manifest of the archives: the commit that moves an archive's cursors adds the files with the records.
CREATE TABLE mill.archive_files (
    interval_id   bigint NOT NULL,
    bundle        bigint NOT NULL,
    path          text COLLATE "C" NOT NULL,  -- below the archive's directory
    records       bigint NOT NULL,
    bytes         bigint NOT NULL,
    event_time_lo bigint NOT NULL,
    event_time_hi bigint NOT NULL,
    partitions    jsonb NOT NULL,  -- source partition or key interval -> numbers of its first and last bundle
    archived_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (interval_id, bundle, path)
);

-- Files that the manifest no longer lists, until they are deleted.
CREATE TABLE mill.archive_garbage (
    path        text COLLATE "C" PRIMARY KEY,
    interval_id bigint NOT NULL,
    deleted_at  timestamptz  -- an object store may still bring it back: it is deleted once more
);

-- What Spark makes of the windows of a result table (`millpy analytics`). The driver with the newest epoch commits, and
-- only the batch behind the last: an older driver, or a batch that is repeated, changes nothing.
CREATE TABLE mill.analytics (
    table_id   integer PRIMARY KEY REFERENCES mill.result_tables ON DELETE CASCADE,
    query      text NOT NULL,  -- the checkpoint and the settings that the rows come from
    epoch      bigint NOT NULL,
    batch      bigint NOT NULL DEFAULT -1,
    windows    bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- The manifest of its Parquet directories. A merged directory has a higher level.
CREATE TABLE mill.analytics_files (
    table_id integer NOT NULL REFERENCES mill.analytics ON DELETE CASCADE,
    name     text COLLATE "C" NOT NULL,
    level    integer NOT NULL,
    start_us bigint NOT NULL,  -- the starts of the first and the last window
    end_us   bigint NOT NULL,
    PRIMARY KEY (table_id, name)
);

CREATE TABLE mill.device_hours (
    table_id integer NOT NULL REFERENCES mill.analytics ON DELETE CASCADE,
    device   text COLLATE "C" NOT NULL,
    bucket   bigint NOT NULL,  -- the number of the hour by the clocks of the zone
    hour     timestamptz NOT NULL,
    windows  bigint NOT NULL,
    measured bigint NOT NULL,  -- windows with a value
    records  bigint,
    late     bigint NOT NULL,
    mean     double precision,
    stddev   double precision,
    low      double precision,
    median   double precision,
    high     double precision,
    baseline text,
    expected double precision,
    scale    double precision,
    first_at timestamptz NOT NULL,
    last_at  timestamptz NOT NULL,
    PRIMARY KEY (table_id, device, bucket)
);
CREATE INDEX device_hours_age ON mill.device_hours (table_id, hour);

CREATE TABLE mill.device_anomalies (
    table_id     integer NOT NULL REFERENCES mill.analytics ON DELETE CASCADE,
    device       text COLLATE "C" NOT NULL,
    window_start timestamptz NOT NULL,
    window_end   timestamptz NOT NULL,
    pane_index   bigint NOT NULL,
    value        double precision NOT NULL,
    baseline     text NOT NULL,
    expected     double precision NOT NULL,
    scale        double precision NOT NULL,
    score        double precision NOT NULL,
    found_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (table_id, device, window_start, window_end)
);
CREATE INDEX device_anomalies_age ON mill.device_anomalies (table_id, window_start);

-- The hours of result tables that audits have compared: of windows by their end, of records by their event time.
CREATE TABLE mill.audits (
    graph_id    integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    table_name  text NOT NULL,
    hour        bigint NOT NULL,  -- its beginning
    engine      text NOT NULL CHECK (engine IN ('hosted', 'native')),
    by_service  boolean NOT NULL,
    rows        bigint NOT NULL,
    differences bigint NOT NULL,
    uncertain   bigint NOT NULL,
    corrected   bigint NOT NULL DEFAULT 0,  -- rows that differ because operators corrected them, not in differences
    examples    jsonb NOT NULL,  -- the first differences, bounded in number and bytes
    audited_at  timestamptz NOT NULL,
    differs_at  timestamptz,  -- when an audit first found just these differences, and raised an event; NULL for none
    PRIMARY KEY (graph_id, table_name, hour)
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
CREATE INDEX events_kind ON mill.events (graph_id, kind, event_id);  -- events are few beside commits, and most kinds rare

-- What each live worker knows of the lookup tables that it reads. What a bundle saw is in its delta.
CREATE TABLE mill.lookups (
    worker_id     uuid NOT NULL REFERENCES mill.workers ON DELETE CASCADE,
    table_name    text NOT NULL,
    refresh_s     double precision NOT NULL,
    computations  text[] NOT NULL,  -- those that need it, among the ones that the worker runs
    version       text,  -- NULL until a read has succeeded
    rows          bigint,
    bytes         bigint,
    misfits       bigint NOT NULL,  -- rows that do not fit their class
    misfit        text NOT NULL,
    loaded_at     timestamptz,
    checked_at    timestamptz NOT NULL,
    failing_since timestamptz,
    error         text NOT NULL,  -- why the last read failed; empty if it succeeded
    PRIMARY KEY (worker_id, table_name)
);

-- Whether source partitions are connected, as the worker that owns them said last: when something has changed.
CREATE TABLE mill.source_connections (
    interval_id bigint PRIMARY KEY REFERENCES mill.intervals ON DELETE CASCADE,
    worker_id   uuid NOT NULL,  -- that reported it; another owner has not reported yet
    connected   boolean NOT NULL,
    since       timestamptz NOT NULL,
    why         text NOT NULL,  -- why there is no connection; empty while there is one
    attempts    bigint NOT NULL,  -- to connect, since then
    address     text NOT NULL,  -- where other workers reach that worker; empty if the source needs none
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The messages of sinks that are not delivered yet: one row for each bundle, with its messages as columns. A position
-- counts the messages of an interval, without a gap.
CREATE TABLE mill.outbox (
    interval_id  bigint NOT NULL REFERENCES mill.intervals ON DELETE CASCADE,
    position     bigint NOT NULL CHECK (position >= 0),  -- of the first message
    records      integer NOT NULL CHECK (records > 0),
    bundle       bigint NOT NULL,
    checksum     bigint NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    payload      bytea NOT NULL,
    PRIMARY KEY (interval_id, position)
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_scale_factor = 0.0,
        toast.autovacuum_vacuum_threshold = 10000);
ALTER TABLE mill.outbox ALTER COLUMN payload SET STORAGE EXTERNAL;

-- How far the outbox of each interval of a sink is delivered, and whether the sink is connected, as the owner said last.
-- It stays when the rows are deleted.
CREATE TABLE mill.deliveries (
    interval_id  bigint PRIMARY KEY REFERENCES mill.intervals ON DELETE CASCADE,
    delivered    bigint NOT NULL CHECK (delivered >= 0),  -- the other side has all before it, except refused messages
    delivered_at timestamptz,  -- when that was recorded
    sequencer    bigint NOT NULL,  -- of the owner that has read the outbox, or reported, last: earlier ones are refused
    connected    boolean NOT NULL,
    since        timestamptz NOT NULL,
    why          text NOT NULL,  -- why there is no connection; empty while there is one
    attempts     bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- The messages that the other side of a sink refuses, and those of their keys that wait behind them, until they are
-- delivered or become dead letters.
CREATE TABLE mill.refused_messages (
    interval_id bigint NOT NULL REFERENCES mill.intervals ON DELETE CASCADE,
    position    bigint NOT NULL CHECK (position >= 0),
    key         text NOT NULL,
    attempts    bigint NOT NULL,  -- to deliver it; 0 while it waits behind another one
    since       timestamptz NOT NULL,  -- when it was refused first, or since when it waits
    why         text NOT NULL,  -- why it was refused last; empty while it waits behind another one
    parked      boolean NOT NULL,  -- whether its key waits until an operator releases it
    record      bytea NOT NULL,  -- that it was made of, as JSON
    checksum    bigint NOT NULL,
    payload     bytea NOT NULL,  -- the message
    PRIMARY KEY (interval_id, position)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- The numbers of dead letters, late records and events that were deleted by age. For events, `reason` is their kind.
CREATE TABLE mill.expired (
    graph_id    integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    table_name  text NOT NULL CHECK (table_name IN ('dead_letters', 'late_records', 'events')),
    stream      text NOT NULL,
    computation text NOT NULL,
    reason      text NOT NULL,
    count       bigint NOT NULL,
    PRIMARY KEY (graph_id, table_name, stream, computation, reason)
);

-- The records of millpy.inject, until every source that reads their stream has committed them.
--
-- A transaction that began to write earlier may commit later, so numbers alone do not tell what was read. A reader keeps
-- the greatest number that it has read and the transactions that were open in the snapshot of that read: it has not read
-- what has a greater number or is of one of these. Of the ids from its xmax on, a snapshot does not name those that were
-- given already: they all count as open. That is exact because inject has its transaction's id before it takes a number:
-- a transaction without an id at the snapshot takes a greater one.
CREATE TABLE mill.injected_records (
    stream      text COLLATE "C" NOT NULL,
    number      bigint GENERATED ALWAYS AS IDENTITY,
    xid         xid8 NOT NULL,  -- the transaction
    bytes       integer NOT NULL,
    injected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    dedupe_id   text,
    record      jsonb NOT NULL,
    PRIMARY KEY (stream, number)
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);
CREATE INDEX injected_records_xid ON mill.injected_records (stream, xid, number);

-- The sources that read injected records, and what they have read. Deployments add and delete them.
CREATE TABLE mill.injection_readers (
    graph_id    integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    source      text COLLATE "C" NOT NULL,
    stream      text COLLATE "C" NOT NULL,
    waiting_max bigint NOT NULL DEFAULT 1000000 CHECK (waiting_max > 0),  -- inject raises when as many records wait
    waits       boolean NOT NULL DEFAULT false,  -- whether it sleeps, so that inject has to notify it
    read_number bigint NOT NULL,
    open_xids   int8multirange NOT NULL DEFAULT '{}',
    rest_xids   int8multirange NOT NULL DEFAULT '{}',  -- of these, records between rest_after and read_number are unread
    rest_after  bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (graph_id, source)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX injection_readers_stream ON mill.injection_readers (stream);

-- The replication slots of sources that read tables of this database: `millpy drop` and `millpy deploy` drop those of
-- sources that are gone.
CREATE TABLE mill.table_slots (
    graph_id integer NOT NULL REFERENCES mill.graphs ON DELETE CASCADE,
    source   text COLLATE "C" NOT NULL,
    slot     text COLLATE "C" NOT NULL,
    PRIMARY KEY (graph_id, source, slot)
);

-- Who may use the API. A row without a hash is an identity that a reverse proxy vouches for. The hash is a plain SHA-256:
-- a token is 32 random bytes, which no dictionary has and no search finds, so a slow hash with salt would add nothing.
CREATE TABLE mill.tokens (
    token_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text NOT NULL CHECK (name <> ''),
    hash          bytea UNIQUE CHECK (octet_length(hash) = 32),
    role          text NOT NULL CHECK (role IN ('viewer', 'operator', 'admin')),
    database_role text CHECK (database_role <> 'none'),  -- set_config would take none for the login itself
    created_by    text NOT NULL DEFAULT session_user,
    created_at    timestamptz NOT NULL DEFAULT now(),
    expires_at    timestamptz,  -- null for a token without an end
    revoked_at    timestamptz,
    used_on       date,  -- the last day, by UTC
    CHECK (database_role IS NULL OR role = 'viewer')
);
CREATE UNIQUE INDEX tokens_name ON mill.tokens (name) WHERE revoked_at IS NULL;

-- The sessions of browsers, each made from a token. The hash is that of the cookie.
CREATE TABLE mill.sessions (
    hash       bytea PRIMARY KEY CHECK (octet_length(hash) = 32),
    token_id   bigint NOT NULL REFERENCES mill.tokens ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX sessions_token ON mill.sessions (token_id, created_at);

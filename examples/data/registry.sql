-- The tables that examples/registry.py and examples/thresholds.py look up in.
CREATE SCHEMA IF NOT EXISTS plant_registry;
CREATE TABLE IF NOT EXISTS plant_registry.devices (
    device text PRIMARY KEY,
    hall   text NOT NULL,
    maker  text
);
INSERT INTO plant_registry.devices VALUES
    ('boiler', 'north', 'Viessmann'), ('chiller', 'north', 'Trane'), ('compressor', 'south', NULL),
    ('press', 'south', 'Schuler')
ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS plant_registry.thresholds (
    name   text PRIMARY KEY,
    device text,  -- NULL: every device
    above  double precision NOT NULL
);
INSERT INTO plant_registry.thresholds VALUES ('overheated', NULL, 90), ('warm chiller', 'chiller', 12)
ON CONFLICT DO NOTHING;

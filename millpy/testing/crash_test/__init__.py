"""`millpy crash-test`: a user's graph under faults, against fault-free runs of the same input.

options    the arguments, checked                    session   the whole test, in order; READ THIS FIRST
inputs     the input of each source, as plain lines  generate  records made up from a schema
feed_source  replaces the graph's own source         feeder    writes to the feeds, in time with the faults
databases  databases to run in                       database  all SQL
worker     entry of a worker process                 processes  starts, kills and freezes workers
plan       the faults, drawn from the seed           faults    carries them out
observer   samples the database: takeovers, recovery, throughput
compare    compares tables with tables               verdict   the meaning of the differences, and their causes
report     the findings, as one value                page      the same as one HTML file
terminal   shows the progress                        text_report  the same as text
"""

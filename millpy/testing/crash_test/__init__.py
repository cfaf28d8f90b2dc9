"""`millpy crash-test`: a user's graph under faults, against fault-free runs of the same input.

options    what was asked for                       session   the whole of it, in order; READ THIS FIRST
inputs     what each source is fed, as plain lines   generate  records made up from a schema
tape       the source that stands in for the graph's own     feeder  writes to it, in time with the faults
place      databases to run in                       database  all SQL
worker     entry of a worker process                 fleet     the processes: start, kill, freeze
plan       which faults, drawn from the seed         faults    carries them out
watch      samples the database: takeovers, recovery, throughput
compare    tables against tables                     verdict   what the differences mean, and why they can be
report     what is told, as one value                page      the same as one HTML file
"""

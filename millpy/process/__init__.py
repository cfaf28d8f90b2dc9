"""A worker as a process: assembled, launched, supervised, ended."""

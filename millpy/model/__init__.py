"""Values: no I/O, no asyncio, no clock."""

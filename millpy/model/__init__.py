"""Values, without I/O, asyncio or clocks."""

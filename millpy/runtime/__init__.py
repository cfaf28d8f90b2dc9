"""The engine: turns, ownership, folding, retention."""

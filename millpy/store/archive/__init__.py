"""Archives as files: the Parquet format, and the directory whose files become visible when they are committed."""

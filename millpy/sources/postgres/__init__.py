"""PostgreSQL as a source: records that transactions inject, changes of tables, and tables that are polled."""

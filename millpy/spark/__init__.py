"""PySpark over millpy's result tables: `spark.read.format("millpy")`, and helpers that spare the options.

    from millpy.spark import read_table, session

    spark = session(database_url="postgresql://reader@db/plant")
    windows = read_table(spark, "factory.temperature_1m", start=datetime(2026, 11, 1, tzinfo=UTC))
    windows.groupBy("device").count().show()

Needs the extra `spark`. A Java 17 or 21 of the system is used where there is one, else the one in a wheel.
"""

from __future__ import annotations

from millpy.errors import ConfigError
from millpy.extras import to_install

try:
    from millpy.spark.session import read_table, register, session
    from millpy.spark.source import MillpyDataSource
except ModuleNotFoundError as error:
    package = (error.name or "pyspark").partition(".")[0]
    raise ConfigError(f"millpy.spark needs the package {package}", hint=to_install("spark")) from error

__all__ = ["MillpyDataSource", "read_table", "register", "session"]

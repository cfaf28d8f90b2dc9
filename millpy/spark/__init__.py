"""PySpark over millpy's result tables: `spark.read.format("millpy")`, and helpers that spare the options.

    from millpy.spark import read_table, session

    spark = session(database_url="postgresql://reader@db/plant")
    windows = read_table(spark, "factory.temperature_1m", start=datetime(2026, 11, 1, tzinfo=UTC))
    windows.groupBy("device").count().show()

Needs `pip install 'millpy[spark]'`. A Java 17 or 21 of the system is used where there is one, else the one in a wheel.
"""

from __future__ import annotations

from millpy.errors import ConfigError

try:
    from millpy.spark.session import read_table, register, session
    from millpy.spark.source import MillpyDataSource
except ModuleNotFoundError as error:
    package = (error.name or "pyspark").partition(".")[0]
    raise ConfigError(f"millpy.spark needs the package {package}", hint="pip install 'millpy[spark]'") from error

__all__ = ["MillpyDataSource", "read_table", "register", "session"]

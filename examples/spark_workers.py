"""Run a graph's workers as tasks of a Spark job, where a cluster has Spark and no place for services.

    MILLPY_DATABASE_URL=postgresql://… spark-submit --master … --conf spark.task.maxFailures=100 \
        examples/spark_workers.py /opt/graphs/factory.py 2

Every machine needs millpy, and the graph's file at the same absolute path.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import SparkSession


def run_workers(spark: SparkSession, graph: Path, database_url: str, workers: int) -> None:
    """Return when the graph has finished; Spark repeats a task whose worker was lost.

    The database's URL goes into the tasks rather than into Spark's configuration, which Spark shows.
    """
    location = str(graph.resolve())

    def work(_: Iterable[int]) -> Iterable[int]:
        # Imported by the task: a graph is shipped as a file, never pickled.
        from millpy.config.settings import Settings
        from millpy.graph.loader import load_graph
        from millpy.process.worker_process import run_until_stopped

        run_until_stopped(load_graph(location), database_url, Settings.load(database_url=database_url), patient=True)
        return ()

    # Plain tasks: in a barrier stage one lost worker would abort the job.
    spark.sparkContext.parallelize(range(workers), workers).mapPartitions(work).collect()


if __name__ == "__main__":
    run_workers(
        SparkSession.builder.appName("millpy workers").getOrCreate(),
        Path(sys.argv[1]),
        os.environ["MILLPY_DATABASE_URL"],
        int(sys.argv[2]),
    )

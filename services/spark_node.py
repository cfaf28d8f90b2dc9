"""A node of a standalone Spark cluster, with the Java that millpy finds.

    python -m services.spark_node master [OPTION ...]
    python -m services.spark_node worker spark://HOST:7077 [OPTION ...]

The options are those of Spark's own classes. A client that reaches the master can run programs on the cluster.
"""

import os
import sys

import pyspark

from millpy.spark.java import java_home

CLASSES = {"master": "org.apache.spark.deploy.master.Master", "worker": "org.apache.spark.deploy.worker.Worker"}

if __name__ == "__main__":
    if sys.argv[1:2] not in (["master"], ["worker"]):
        sys.exit(__doc__)
    home = os.path.dirname(pyspark.__file__)
    environment = {**os.environ, "SPARK_HOME": home, "JAVA_HOME": str(java_home())}
    program = f"{home}/bin/spark-class"
    os.execve(program, [program, CLASSES[sys.argv[1]], *sys.argv[2:]], environment)

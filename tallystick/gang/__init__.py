"""What resident tasks do of themselves: no Spark, no sockets, so that the simulator runs it too.

`spark.gang` starts them and connects them.
"""

"""What becomes of files that the store refuses for good [Q1].

    refused file ─▶ worker ─▶ reader: records from Kafka again, else lines of the file ─▶ sinks: topic, folder

With the DLQ off a refused file is held on Kafka and kept aside on gRPC (`refused`). `setup` wires it.
"""

"""A task in a process of its own, which a test kills: prepares transactions, and says of each.

    dying_writer.py <dsn> <table> <way> [<task>]

Prints a committable's fields per line, as JSON, once it is prepared. It never ends by itself.
"""

import json
import sys
import time

from postgres_writing import opened, place_of, rows_of

ROWS = 2_000


def main(dsn: str, table: str, way: str, endless: str) -> None:
    driver = opened(dsn, table, transactions=way)
    epoch = 0
    while True:
        epoch += 1
        transaction = driver.plan().begin(place_of(epoch, 3))
        start = epoch * ROWS
        transaction.write(rows_of(*range(start, start + ROWS)))
        for committable in transaction.prepare():
            print(json.dumps(committable.to_fields()), flush=True)
        while endless == "once":
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

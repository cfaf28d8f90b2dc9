"""The application of `orders.py`: stores orders, and injects each one in the same transaction.

python examples/orders_app.py "$MILLPY_DATABASE_URL"
"""

import random
import sys
import uuid
from datetime import UTC, datetime, timedelta

import psycopg

TABLE = """
CREATE TABLE IF NOT EXISTS public.orders (
    id uuid PRIMARY KEY, customer text NOT NULL, ordered_at timestamptz NOT NULL, cents bigint NOT NULL)
"""
ORDER = """
WITH ordered AS (INSERT INTO public.orders VALUES (%s, %s, %s, %s) RETURNING *)
SELECT millpy.inject('orders', to_jsonb(ordered), id::text) FROM ordered
"""


def main(url: str, chance: random.Random, ago: timedelta) -> None:
    """Order for ever, one to five orders a transaction; some customers change their mind."""
    with psycopg.connect(url) as connection:
        connection.execute(TABLE)
        connection.commit()
        while True:
            customer = chance.choice(["ada", "bob", "cy"])
            for _ in range(chance.randint(1, 5)):
                cents = chance.randint(100, 10_000)
                at = datetime.now(UTC) - ago
                connection.execute(ORDER, [uuid.UUID(int=chance.getrandbits(128)), customer, at, cents])
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()


if __name__ == "__main__":
    main(sys.argv[1], random.Random(), timedelta(seconds=float((*sys.argv, 0)[2])))

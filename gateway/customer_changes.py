"""Changes of customers: read, changed, written, and answered when every live gateway knows.

Ordering: one change at a time through this gateway, each on the row that the one before left. The `customers` table has
no single writer: of two changes to one customer through two gateways at the same moment, one is lost; `lorafleet
customers` always takes the first gateway. A crash: the row was written or not, as a look at it tells.
"""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from gateway.auth import Keys
from gateway.errors import ApiError
from gateway.internal_auth import operator
from gateway.readiness import Readiness
from gateway.registrar import confirmed
from gateway.tables import Tables
from schemas.customers import Customer
from schemas.topics import CUSTOMERS
from streams.adapters.names import InvalidName, parse_customer
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.writer import Writer

SEND_LIMIT_S = 5.0
Change = Callable[[Customer | None, int], Customer]  # the row and the time in unix ms -> the row it becomes


class CustomerChanges:
    def __init__(self, keys: Keys, tables: Tables, writer: Writer, readiness: Readiness) -> None:
        self._keys, self._tables, self._writer, self._readiness = keys, tables, writer, readiness
        self._one = asyncio.Lock()

    def asked(self, request: web.Request) -> tuple[str, Customer | None]:
        """The customer that an operator's request names, and its row. Raises ApiError (400, 401, 403, 503)."""
        self.allow(request)
        try:
            name = parse_customer(request.match_info["customer"])
        except InvalidName as error:
            raise ApiError("invalid_request", str(error), "customer") from None
        return name, self._keys.customer(name)

    def allow(self, request: web.Request) -> None:
        """Raises ApiError unless an operator asks."""
        self._readiness.check_tables()
        operator(self._keys, request.headers.get("Authorization"))

    def all(self) -> list[Customer]:
        return self._keys.customers()

    async def make(self, name: str, change: Change) -> Customer:
        """The row as it is now, everywhere. Raises ApiError, the change's own too."""
        self._readiness.check()
        async with self._one:
            customer = change(self._keys.customer(name), time.time_ns() // 1_000_000)
            try:
                written = await self._writer.send(CUSTOMERS, customer, key=name, timeout_s=SEND_LIMIT_S)
            except NotWritten as error:
                raise ApiError("broker", f"the customer was not written: {error}") from None
            except BusUnavailable as error:
                raise ApiError("unconfirmed", f"the customer may not have been written: {error}") from None
            await confirmed(self._tables, CUSTOMERS, written.partition, written.offset)
        return customer


def told_of(customer: Customer) -> dict[str, object]:
    """The row as people see it: without the keys' hashes."""
    shown = {name: getattr(customer, name) for name in customer.__struct_fields__ if name != "keys"}
    keys = [{name: getattr(key, name) for name in key.__struct_fields__ if name != "sha256"} for key in customer.keys]
    return shown | {"keys": keys}


def there(name: str, customer: Customer | None) -> Customer:
    """Raises ApiError (404)."""
    if customer is None:
        raise ApiError(
            "not_found", f"customer {name} is not there: PUT /internal/customers/{name} makes it", "customer"
        )
    return customer

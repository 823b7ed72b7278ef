"""Which places a registration may name: the fleet's allow-list, and nothing else.

Each entry is s3://bucket, s3://bucket/prefix or file:///folder. `{customer}` in it stands for the customer whose
adapter is registered, so that no pipeline can register out of another customer's folder.
"""

from streams.adapters.locations import InvalidLocation, Location, parse_location
from streams.adapters.store import S3Settings, Store, open_store


class Sources:
    """The allow-list, read once. Raises ValueError naming an entry that does not parse."""

    def __init__(self, text: str, settings: S3Settings) -> None:
        self._roots = [entry for part in text.split(",") if (entry := part.strip())]
        self._settings = settings
        self._stores: dict[str, Store] = {}
        for entry in self._roots:
            try:
                parse_location(entry.replace("{customer}", "customer"))
            except InvalidLocation as error:
                raise ValueError(f"LORAFLEET_SOURCES: {error}") from None

    def find(self, location: Location, customer: str) -> Store | None:
        """The store that may read `location` for this customer; None when no entry allows it."""
        for entry in self._roots:
            root = parse_location(entry.replace("{customer}", customer))
            if location.within(root) is not None:
                if str(root) not in self._stores:
                    self._stores[str(root)] = open_store(root, self._settings)
                return self._stores[str(root)]
        return None

"""Who may do what on the internal port: operators everything, a pipeline what is its own customer's. Pure."""

from gateway.auth import Identity, Keys
from gateway.errors import ApiError
from schemas.reasons import Role


def operator(keys: Keys, authorization: str | None) -> Identity:
    """Raises ApiError (401, 403)."""
    return keys.allow(authorization, Role.OPERATOR)


def pipeline(keys: Keys, authorization: str | None, customer: str | None = None) -> Identity:
    """An operator, or the pipeline of `customer` (None: of any). Raises ApiError (401, 403)."""
    identity = keys.allow(authorization, Role.OPERATOR, Role.PIPELINE)
    own = identity.customer.customer
    if identity.role is Role.PIPELINE and customer not in (None, own):
        raise ApiError("forbidden", f"this key is the pipeline's of {own}, not of {customer}")
    return identity

"""The gateway with short limits for clients that are slow, so that a test need not wait for the real ones."""

import sys
from functools import partial

import gateway.__main__ as process
from gateway import body, slow_reader
from gateway.ports import listen

body.BODY_LIMIT_S = 3.0
slow_reader.WRITE_LIMIT_S = 2.0
vars(process)["listen"] = partial(listen, idle_s=3.0)

if __name__ == "__main__":
    sys.exit(process.main())

"""`jsonschema`, the independent validator, without what it would need four seconds to import.

The grammars of internationalised addresses are built then; they serve checks of formats, which no
test here asks for. Without their package `jsonschema` leaves that one check out.
"""

import sys

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
try:
    from jsonschema import Draft202012Validator
finally:
    del sys.modules["rfc3987_syntax"]

__all__ = ["Draft202012Validator"]

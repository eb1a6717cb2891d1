"""Bytes that are nearly right."""

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes with one change: some are replaced, cut out or put in."""
    at = draw(st.integers(0, len(data)))
    until = draw(st.integers(at, min(at + 3, len(data))))
    return data[:at] + draw(st.binary(max_size=3)) + data[until:]

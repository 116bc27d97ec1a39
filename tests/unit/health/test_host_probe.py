"""The connection of a process to itself, which stages need."""

from dj2mgm.health.host_probe import connect_to_itself


def test_connection_to_itself_is_tried():
    assert connect_to_itself() is None
    assert "Cannot assign requested address" in connect_to_itself("192.0.2.1")  # an address reserved for documentation

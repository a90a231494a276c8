"""The registries of plugins, put back after a test that loads some."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import outrider.api  # defines all registries
from outrider.conf import compose, plugins


@contextmanager
def restored_registries() -> Iterator[None]:
    """Forget what is registered and loaded inside."""
    assert "LOSSES" in outrider.api.__all__
    known = [(one, dict(one.data), dict(one.owner)) for one in plugins._REGISTRIES]
    added, loaded = dict(compose.ADDED), dict(plugins.LOADED)
    try:
        yield
    finally:
        for registry, data, owner in known:
            registry.data, registry.owner = data, owner
        compose.ADDED.clear()
        compose.ADDED.update(added)
        plugins.LOADED.clear()
        plugins.LOADED.update(loaded)
        for cached in (compose.known_keys, compose.default_values, compose._file_values):
            cached.cache_clear()
        for name in [name for name in sys.modules if name.startswith("outrider_plugin_")]:
            del sys.modules[name]

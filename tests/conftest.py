"""Fixtures for the tests that drive the page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only what a busy machine can spoil is tried again: the browser's tests. An unequal text never is."""
    for item in items:
        if item.get_closest_marker("browser"):
            measures = item.get_closest_marker("slow")
            item.add_marker(pytest.mark.flaky(reruns=4 if measures else 2))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The app on a fast fake engine."""
    browsing = pytest.importorskip("browsing")
    running = browsing.Server(tmp_path_factory.mktemp("page") / "conversations.db", "--rate", "150").start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    browsing = pytest.importorskip("browsing")
    with playwright.sync_playwright() as p:
        running = p.chromium.launch(**browsing.CHROMIUM)
        yield running
        running.close()

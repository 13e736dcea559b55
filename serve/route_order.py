# SPDX-License-Identifier: Apache-2.0
"""Puts a plugin's routes in the place of those that were there before: vLLM 0.31 leaves both, and answers by its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


@contextmanager
def replacing(app: FastAPI) -> Iterator[None]:
    """Have routes that are added meanwhile answer their paths and methods; earlier ones keep their other methods."""
    earlier = list(app.router.routes)
    yield
    known = {id(route) for route in earlier}
    added = [route for route in app.router.routes if id(route) not in known]
    taken = {
        (route.path, method) for route in added if isinstance(route, APIRoute) for method in route.methods
    }
    kept = (_without(route, taken) for route in earlier)
    app.router.routes[:] = [*added, *(route for route in kept if route is not None)]


def _without(route: BaseRoute, taken: set[tuple[str, str]]) -> BaseRoute | None:
    """Return the route with those methods that are not taken, if any."""
    if not isinstance(route, APIRoute):
        return route
    methods = {method for method in route.methods if (route.path, method) not in taken}
    if methods == route.methods:
        return route
    left = copy(route)
    left.methods = methods
    return left if methods else None

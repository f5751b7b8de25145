"""For every test."""

from __future__ import annotations

import signal

import hypothesis

# The first example of a test may compile what it tests.
hypothesis.settings.register_profile("fluxgen", deadline=None)
hypothesis.settings.load_profile("fluxgen")

# A shell starts what runs in its background with Ctrl-C ignored, and so would all that the tests
# start, which are to be interrupted by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

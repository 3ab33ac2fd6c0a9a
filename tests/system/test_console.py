"""Progress on stderr."""

import threading

import tqdm

from hypjax.system import console


def test_no_thread_of_progress_bars_is_left_to_the_interpreter():
    def watching():
        return [thread for thread in threading.enumerate() if isinstance(thread, tqdm.TMonitor)]

    tqdm.tqdm(range(2), disable=True)
    assert watching()
    console.join_monitors()
    assert not watching()

"""One process, several threads that compute: keeping OpenMP's workers from crowding each other out."""

import ctypes
import logging

logger = logging.getLogger(__name__)

_SOFT = 1  # omp_pause_soft: workers come back when the thread next computes


def release_workers() -> None:
    """Let go of the OpenMP workers that the calling thread has gathered; it gets new ones when it needs them.

    Every thread that computes with torch has workers of its own. Once there are more of them than processors, GNU's
    OpenMP stops letting them wait awake between operations, which makes small operations a third slower. A thread that
    has loaded a model and now hands the work to another does not need its own any more.

    Does nothing where OpenMP is older than 5.0 or is not there.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return
    if pause(_SOFT) != 0:
        logger.debug("OpenMP kept its workers: called inside a parallel region")

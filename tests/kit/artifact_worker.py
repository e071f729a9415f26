"""``python -m tests.kit.artifact_worker WHAT CACHE ORIGIN MAX_BYTES``: another process that uses a cache of artifacts.

hold: have the artifact, print ``holds``, and stay; hang: stay in the middle of the download, after ``half``; slow:
download it once a line is read; use: print a line at each step of the download.
"""

import sys
from pathlib import Path

from fairlane_server.artifacts.digest import digest_of_folder
from tests.kit.artifact_kit import cache_of, contents, never_stop


def main() -> None:
    what, cache, origin, max_bytes = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

    def say(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - its parent reads it

    def fill(folder: Path) -> None:
        if what == "slow":
            say("downloads")
            sys.stdin.readline()
        for name, content in contents(origin).items():
            step = len(content) // 8
            with (folder / name).open("wb") as file:
                for start in range(0, len(content), step):
                    file.write(content[start : start + step])
                    file.flush()
                    if what == "use":
                        say("step")
                    if what == "hang":
                        say("half")
                        never_stop(600)

    size_bytes = sum(map(len, contents(origin).values()))
    found = cache_of(cache, max_bytes).get(digest_of_folder(origin), lambda: size_bytes, fill, never_stop)
    assert contents(found.path) == contents(origin)
    say("holds" if what == "hold" else "has")
    if what == "hold":
        never_stop(600)


if __name__ == "__main__":
    main()

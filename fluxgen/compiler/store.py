"""Compiled kernels on disk, addressed by everything that went into them.

``<root>/<key[:2]>/<key>/`` holds ``kernel.so``, ``kernel.cu``, ``meta.json`` and ``build.log``. It
appears by one rename, whole or not at all. Beside it: ``refs/`` (source -> key, so that a machine
without nvcc finds what was built from a source), ``locks/``, ``tmp/`` (what is being built) and
``failed/`` (source and log of failed builds). Reading writes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fluxgen.compiler import artifact as artifacts
from fluxgen.compiler import locks, private
from fluxgen.compiler.artifact import Artifact, key_of, source_key
from fluxgen.compiler.headers import headers_hash
from fluxgen.compiler.nvcc import CU, DEFAULT_TIMEOUT_S, LOG, SO, CompileError, Source, compile
from fluxgen.compiler.toolchain import Toolchain
from fluxgen.core.errors import StoreError
from fluxgen.core.settings import Settings

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9a-f]{64}")
_ERROR = "error.json"


class Store:
    """The store at ``root``, by default ``Settings.store``. Nothing is created before a build."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (Settings.load().store if root is None else root).expanduser().absolute()

    def get(self, key: str) -> Artifact | None:
        """The kernel under ``key``, or ``None`` if there is none.

        Raises:
            StoreError: the store is not private, or the kernel is damaged.
        """
        if not _KEY.fullmatch(key):
            raise StoreError(f"store key: expected 64 hexadecimal digits; found {key!r}")
        directory = self._directory(key)
        try:
            private.check(self._real_root(), directory=True)
            private.check(directory.parent, directory=True)
            private.check(directory, directory=True)
        except FileNotFoundError:
            return None
        return artifacts.read(directory, key)

    def find(self, source: Source) -> Artifact | None:
        """The kernel last built from ``source``, by whatever toolchain; needs no nvcc.

        Raises:
            StoreError: as :meth:`get`.
        """
        try:
            private.check(self._ref(source), directory=False)
            key = self._ref(source).read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"store: cannot read {self._ref(source)}: {error}") from error
        return self.get(key)

    def load_path(self, key: str) -> Path:
        """The library under ``key``, checked: private, whole, of the bytes that were built.

        Raises:
            StoreError: there is none, or it must not be loaded.
        """
        found = self.get(key)
        if found is None:
            raise StoreError(
                f"store: expected kernel {key} in {self.root}; found none. Build it first, or set "
                f"FLUXGEN_STORE to the store that has it."
            )
        return found.path

    def build(
        self,
        source: Source,
        toolchain: Toolchain,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        cancel: threading.Event | None = None,
        report: Callable[[str], None] = _log.warning,
    ) -> Artifact:
        """The kernel of ``source``: from the store, or compiled and put there.

        However many processes ask at once, one compiles and the others wait for it. A damaged
        kernel is built anew.

        Args:
            source, toolchain: what to compile, and by what.
            timeout: of nvcc, seconds.
            cancel: stops nvcc when set (``process.Cancelled`` is raised).
            report: gets a line when a wait is long or a damaged kernel is replaced.

        Raises:
            CompileError: see :func:`fluxgen.compiler.nvcc.compile`; the log is in ``failed/``.
            StoreError: the store is not private, cannot be written, or is full.
        """
        key = key_of(source, toolchain)
        if (found := self._sound(key, report)) is not None:
            self._point(source, key)
            return found
        with self._writing():
            self._prepare()
            began = time.time()
            # Whoever holds the lock compiles for at most `timeout`.
            with locks.hold(
                self._lock(key), timeout=timeout * 2, report=report, cancel=cancel
            ) as waited:
                if (found := self._sound(key)) is not None:
                    return found
                if waited:
                    self._raise_shared_failure(key, began)
                self._sweep(key)
                made = self._build_locked(key, source, toolchain, timeout, cancel)
                self._point(source, key)
                return made

    def list(self) -> list[Artifact]:
        """All kernels, oldest first. Damaged ones are left out; no library is read.

        Raises:
            StoreError: the store is not private.
        """
        try:
            private.check(self._real_root(), directory=True)
        except FileNotFoundError:
            return []
        found = []
        for directory in self.root.glob("[0-9a-f][0-9a-f]/*"):
            if _KEY.fullmatch(directory.name):
                with contextlib.suppress(StoreError):
                    found.append(artifacts.read(directory, directory.name, verify=False))
        return sorted(found, key=lambda item: (item.created, item.key))

    def clean(self, everything: bool = False) -> int:
        """Remove leavings of dead builds, logs of failed ones and damaged kernels.

        What is being built now is left alone.

        Args:
            everything: remove all kernels too.

        Returns:
            How many directories were removed.

        Raises:
            StoreError: the store is not private or cannot be written.
        """
        try:
            private.check(self._real_root(), directory=True)
        except FileNotFoundError:
            return 0
        with self._writing():
            self._prepare()
            removed = 0
            for path in [*self.root.glob("tmp/*"), *self.root.glob("failed/*")]:
                removed += self._remove_if_free(path)
            for path in self.root.glob("[0-9a-f][0-9a-f]/*"):
                if _KEY.fullmatch(path.name) and (everything or not self._is_sound(path.name)):
                    removed += self._remove_if_free(path)
            return removed

    def sweep(self) -> None:
        """Remove the leavings of builds whose process is dead, if the store can be written."""
        with contextlib.suppress(StoreError, OSError):
            private.check(self._real_root(), directory=True)
            for path in self.root.glob("tmp/*"):
                self._remove_if_free(path)

    def _build_locked(
        self,
        key: str,
        source: Source,
        toolchain: Toolchain,
        timeout: float,
        cancel: threading.Event | None,
    ) -> Artifact:
        _check_headers(source)
        work = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self.root / "tmp"))
        try:
            try:
                made = compile(source, toolchain, work, timeout, cancel=cancel)
                _check_headers(source)
            except CompileError as error:
                raise self._keep_failure(key, work, error) from error
            artifact = Artifact(
                key=key,
                name=source.name,
                arch=source.arch,
                path=self._directory(key) / SO,
                sha256=artifacts.file_hash(made.path),
                facts=made.facts,
                versions=artifacts.versions_of(source, toolchain),
                created=time.time(),
                seconds=round(made.seconds, 3),
            )
            artifacts.write_meta(work, artifact)
            self._publish(work, self._directory(key))
            return artifact.fresh()
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, work: Path, target: Path) -> None:
        for name in (SO, CU, LOG, artifacts.META):
            (work / name).chmod(0o600)
            _fsync(work / name)
        _fsync(work)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        private.check(target.parent, directory=True)
        if os.path.lexists(target):
            # Damaged, or it would have been taken. Who has it loaded keeps its inode.
            target.rename(work.with_name(work.name + ".old"))
            shutil.rmtree(work.with_name(work.name + ".old"), ignore_errors=True)
        work.rename(target)
        _fsync(target.parent)

    def _keep_failure(self, key: str, work: Path, error: CompileError) -> CompileError:
        kept = self.root / "failed" / key
        data = {"reason": error.reason, "transient": error.transient}
        (work / _ERROR).write_text(json.dumps(data) + "\n", "utf-8")
        (work / SO).unlink(missing_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        work.rename(kept)
        return CompileError(error.reason, kept / LOG, error.transient)

    def _raise_shared_failure(self, key: str, since: float) -> None:
        """Eight ranks that wait for one bad kernel must not compile it eight times in a row."""
        kept = self.root / "failed" / key
        try:
            if (kept / _ERROR).stat().st_mtime < since - 0.1:
                return
            data = json.loads((kept / _ERROR).read_text("utf-8"))
        except (OSError, ValueError):
            return
        if not data["transient"]:
            raise CompileError(str(data["reason"]), kept / LOG)

    def _sound(self, key: str, report: Callable[[str], None] | None = None) -> Artifact | None:
        with contextlib.suppress(FileNotFoundError):
            private.check(self._real_root(), directory=True)
        try:
            return self.get(key)
        except StoreError as error:
            if report is not None:
                report(f"building again: {error}")
            return None

    def _is_sound(self, key: str) -> bool:
        return self._sound(key) is not None

    def _prepare(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        private.check(self._real_root(), directory=True)
        for name in ("locks", "tmp", "failed", "refs"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
            private.check(self.root / name, directory=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(
                    f"no space left on the disk of {self.root}; free some, or set FLUXGEN_STORE to "
                    f"another disk"
                ) from error
            raise StoreError(
                f"store: expected to be able to write in {self.root}; found: {error}. Set "
                f"FLUXGEN_STORE or FLUXGEN_HOME to a directory of yours."
            ) from error

    def _point(self, source: Source, key: str) -> None:
        ref = self._ref(source)
        # A read-only store cannot change its mind about which toolchain's kernel is the latest.
        with contextlib.suppress(OSError):
            if ref.is_file() and ref.read_text("utf-8").strip() == key:
                return
            fd, name = tempfile.mkstemp(prefix=".", dir=ref.parent)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(key + "\n")
            Path(name).rename(ref)

    def _sweep(self, key: str) -> None:
        # The lock is ours, so whoever made these is dead.
        for path in self.root.glob(f"tmp/{key}.*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_if_free(self, path: Path) -> int:
        with locks.hold_if_free(self._lock(path.name[:64])) as held:
            if held:
                shutil.rmtree(path, ignore_errors=True)
        return int(held)

    def _real_root(self) -> Path:
        return Path(os.path.realpath(self.root))

    def _directory(self, key: str) -> Path:
        return self.root / key[:2] / key

    def _lock(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"

    def _ref(self, source: Source) -> Path:
        return self.root / "refs" / source_key(source)


def _check_headers(source: Source) -> None:
    if headers_hash(source.text, source.include) != source.headers_hash:
        raise CompileError(
            f"{source.name}: headers in {source.include} changed since the source was made; again",
            transient=True,
        )


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""A real PostgreSQL server on the loopback, in a folder of its own, that tests stop and start.

From Debian's package `postgresql`: `apt-get install postgresql`. It refuses to run as root, so root
starts it as the user postgres.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ranks import free_port

PASSWORD = "not-to-be-found-4711"
USER = DATABASE = "evo"


def _binaries():
    """Return the folder of the server's programs; fails where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise AssertionError(
            "expected a PostgreSQL server to test against, found none; install it: "
            "apt-get install postgresql"
        )
    return found[-1].parent if found else Path(on_path).parent


class Server:
    """A server; use it as a context manager.

    Attributes:
        url: Of its database, as `record.storage` takes it.
    """

    def __enter__(self):
        self._bin = _binaries()
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        if self._as:
            shutil.chown(self._folder, "postgres")
            shutil.chown(secret, "postgres")
        self.port = free_port()
        self._run(
            *("initdb", "-D", self._data, "-U", USER, "-A", "scram-sha-256", "-N"),
            *(f"--pwfile={secret}", "-E", "UTF8", "--locale=C"),
        )
        self.start()
        self.create(DATABASE)
        return self

    def __exit__(self, *error):
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def _data(self):
        return self._folder / "data"

    @property
    def url(self):
        return self.url_of(DATABASE)

    def url_of(self, database):
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{database}"

    def start(self):
        options = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off "
            f"-c unix_socket_directories={self._folder}"
        )
        self._run("pg_ctl", "-D", self._data, "-l", self._log, "-w", "-o", options, "start")

    def start_if_stopped(self):
        """A test that failed may have left it so."""
        if not (self._data / "postmaster.pid").exists():
            self.start()

    def stop(self, how="fast"):
        """Stop; `immediate` as if the machine lost power."""
        self._run("pg_ctl", "-D", self._data, "-m", how, "-w", "stop", check=False)

    def create(self, database, *options):
        """Make another database."""
        self._run("createdb", *self._as_user, *options, database)

    def sql(self, statement):
        self._run("psql", *self._as_user, "-d", DATABASE, "-c", statement)

    @property
    def _as_user(self):
        return ("-h", "127.0.0.1", "-p", self.port, "-U", USER)

    @property
    def _log(self):
        return self._folder / "log"

    def _run(self, program, *arguments, check=True):
        done = subprocess.run(
            [*self._as, str(self._bin / program), *map(str, arguments)],
            cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
            env={**os.environ, "PGPASSWORD": PASSWORD, "LC_ALL": "C"},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{program}: {done.stdout}"

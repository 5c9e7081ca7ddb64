# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A real SLURM on this machine: a controller and two nodes, in one folder, gone at the end.

Nothing of an installed SLURM is used but its programs: own configuration, munge key and socket, and
ports that were free. The nodes' names resolve inside the nodes only.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")
NODES = ("node1", "node2")
MASTER_PORT_BASE = 10000
"""scripts/slurm/common.sh meets at this port plus the job's number."""

CONFIGURATION = """\
ClusterName=drill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
FirstJobId={first_job}
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=2 Gres=gpu:2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=2 Gres=gpu:2
PartitionName=train Nodes=ALL Default=YES PriorityTier=1 GraceTime=100 MaxTime=10
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=10
"""


def missing_programs() -> list[str]:
    """What of SLURM and munge this machine lacks."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class Cluster:
    """A context manager; inside it `run` talks to the cluster.

    Args:
        folder: for all state and logs; its path must be short, for a socket lies in it.
        proctrack: how SLURM finds a step's processes, and so whom a signal reaches: `pgid` (the
            task, but not torchrun's ranks) or `linuxproc` (all that descends from it).
    """

    def __init__(self, folder: Path, proctrack: str) -> None:
        self._folder = folder
        self._proctrack = proctrack
        self._daemons = ExitStack()
        self.environment = dict(
            os.environ,
            PATH=os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin")),
            SLURM_CONF=str(folder / "slurm.conf"),
        )

    def __enter__(self) -> Cluster:
        with ExitStack() as starting:
            starting.push(self._daemons)
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D")
            for node in NODES:
                # In a mount namespace of its own, where the nodes' names resolve.
                hosts = f"mount --bind {self._folder}/hosts /etc/hosts"
                self._start(
                    "unshare", "--mount", "sh", "-c", f"{hosts} && exec slurmd -D -N {node}"
                )
            self._wait_for_nodes()
            starting.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        jobs = ("scancel", "--quiet", "--signal=KILL", "--full", "--user", _user())
        subprocess.run(jobs, env=self.environment, check=False, capture_output=True)
        self._daemons.close()

    def run(self, *command: str) -> str:
        """A command's stdout; raises with its stderr when it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The end of every daemon's log, for a failure's message."""
        return "\n".join(
            f"{path.name}: {path.read_text()[-2000:]}" for path in self._folder.glob("*.log")
        )

    def _configure(self) -> None:
        for name in ("controller", *NODES):
            (self._folder / name).mkdir()
        devices = [self._folder / f"gpu{index}" for index in range(2)]
        for device in devices:
            device.touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-1]\n")
        (self._folder / "hosts").write_text(
            Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n"
        )
        controller, node1, node2 = _free_ports(3, range(30000, 32700))
        (master,) = _free_ports(1, range(MASTER_PORT_BASE + 1000, MASTER_PORT_BASE + 19000))
        (self._folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self._folder,
                host=socket.gethostname(),
                user=_user(),
                proctrack=self._proctrack,
                first_job=master - MASTER_PORT_BASE,
                controller=controller,
                node1=node1,
                node2=node2,
            )
        )

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        own = [f"--{name}={self._folder}/munge.{name.split('-')[0]}"
               for name in ("key-file", "pid-file", "seed-file", "socket", "log-file")]  # fmt: skip
        self._start("munged", "--foreground", "--force", *own)
        wait_until((self._folder / "munge.socket").exists, 20, "munged made no socket", self.logs)

    def _start(self, *command: str) -> None:
        output = (self._folder / f"{len(list(self._folder.glob('*.out')))}.out").open("w")
        process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        output.close()
        self._daemons.callback(_end, process)

    def _wait_for_nodes(self) -> None:
        def ready() -> bool:
            done = subprocess.run(
                ["sinfo", "--noheader", "--partition=train", "--states=idle", "--format=%D"],
                env=self.environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            return done.stdout.strip() == str(len(NODES))

        wait_until(ready, 60, "the nodes did not become idle", self.logs)


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int, among: range) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(among)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def wait_until(condition, seconds: float, failure: str, more) -> None:
    """Polls; raises TimeoutError with what `more()` tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failure} in {seconds:.0f} s\n{more()}")
        time.sleep(0.2)

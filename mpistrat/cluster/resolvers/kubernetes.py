"""KubernetesClusterResolver: the cluster as Kubernetes knows it, pods by label."""

from __future__ import annotations

import enum
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from ...base.errors import ClusterError, explain
from ...base.files import read_whole
from ..spec import ClusterSpec, validate
from .http_json import ask_json, parse_object
from .resolver import ClusterResolver, task_url

__all__ = ["KubernetesClusterResolver", "KubernetesExecutableLocation"]

_NAME = "KubernetesClusterResolver"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = 60.0


@final
class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, and so how it asks Kubernetes.

    Attributes:
        WITHIN_CLUSTER: in a pod, which has a service account.
        OFF_CLUSTER: elsewhere, with `kubectl` and its configuration.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ClusterResolver):
    """The pods with certain labels as tasks, each at the address of its node.

    A job's tasks are the pods of its first selector in the order of their names, then those of the next. Kubernetes is asked
    at each `cluster_spec()`, and `master()` of a task. It does not tell which pod this process is: set `task_type` and
    `task_id` after making it, or the order of the ranks is MPI's.

    In a pod the API server is asked with the service account that Kubernetes mounts, which must be allowed to list pods of all
    namespaces; elsewhere `kubectl` is, with your configuration. The package `kubernetes` is not needed.

    Args:
        job_to_label_mapping: the label selectors of each job (`{"worker": ["job-name=trainer"]}`); default:
            `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: of every address.
        rpc_layer: protocol before addresses.
        override_client: an object with the method `list_pod_for_all_namespaces(label_selector=…)`, such as
            `kubernetes.client.CoreV1Api()`; asked instead.
        executable_location: whether this process is in a pod.

    Raises:
        ClusterError: an argument has another form. Then `cluster_spec()`: Kubernetes cannot be asked or refuses, a pod is not
            running, or the jobs break a rule of roles.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver;
    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod.

    Example:
        >>> resolver = ms.cluster_resolver.KubernetesClusterResolver({"worker": ["job-name=trainer"]})
        >>> resolver.task_type, resolver.task_id = "worker", 0
        >>> resolver.master()  # doctest: +SKIP
        'grpc://10.0.0.7:8470'
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        given: object = executable_location
        if not isinstance(given, KubernetesExecutableLocation):
            expected = "a KubernetesExecutableLocation"
            raise ClusterError(explain(_NAME, "executable_location", expected=expected, got=f"{given!r:.80}"))
        self._selectors = _checked(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port, self._client, self._location = tf_server_port, override_client, executable_location
        self.rpc_layer = rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the pods that Kubernetes has now.

        Raises:
            ClusterError: see the class.
        """
        jobs = self._selectors.items()
        return validate(
            {job: [self._address(*pod) for text in texts for pod in self._pods(text)] for job, texts in jobs}
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of the one that was set; "" if none was."""
        return task_url(self, task_type, task_id, rpc_layer)

    def _pods(self, selector: str) -> list[tuple[str, str, str]]:
        """Return name, phase and node address of each pod with a label, by name."""
        if self._client is not None:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            return sorted(((pod.metadata.name, pod.status.phase, pod.status.host_ip) for pod in pods), key=_name)
        asks = _ask_server if self._location is KubernetesExecutableLocation.WITHIN_CLUSTER else _ask_kubectl
        source, found = asks(selector)
        try:
            pods = [
                (pod["metadata"]["name"], pod["status"]["phase"], pod["status"].get("hostIP", ""))
                for pod in found["items"]
            ]
        except (KeyError, TypeError, AttributeError):
            raise ClusterError(explain(_NAME, source, expected="a list of pods", got=f"{found!r:.80}")) from None
        return sorted(pods, key=_name)

    def _address(self, name: str, phase: str, host: str) -> str:
        if phase != "Running" or not host:
            remedy = "Wait until all are, as with kubectl wait"
            expected, got = f"pod {name} to be running", f"phase {phase}, node {host or 'unknown'}"
            raise ClusterError(explain(_NAME, "job_to_label_mapping", expected=expected, got=got, remedy=remedy))
        return f"{host}:{self._port}"


def _name(pod: tuple[str, str, str]) -> str:
    return pod[0]


def _checked(jobs: object) -> dict[str, list[str]]:
    """Return the selectors of each job."""
    if isinstance(jobs, Mapping):
        lists = [
            isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts) for texts in jobs.values()
        ]
        if all(lists):
            return {job: list(texts) for job, texts in jobs.items()}
    expected = "a list of label selectors for each job"
    raise ClusterError(explain(_NAME, "job_to_label_mapping", expected=expected, got=f"{jobs!r:.120}"))


def _ask_server(selector: str) -> tuple[str, dict[str, Any]]:
    """Return whom this pod's service account asked for the pods with a label, and the answer."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    try:
        token = read_whole(_ACCOUNT / "token").decode().strip()
    except (OSError, ValueError):
        token = ""
    if not (host and port and token):
        got = "no KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT" if token else f"no {_ACCOUNT / 'token'}"
        remedy = "Elsewhere, pass executable_location=OFF_CLUSTER, which asks kubectl"
        expected = "a pod with a service account"
        raise ClusterError(explain(_NAME, "executable_location", expected=expected, got=got, remedy=remedy))
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    url = f"{server}/api/v1/pods?labelSelector={quote(selector, safe='')}"
    headers = {"Authorization": f"Bearer {token}"}
    remedy = "The pod's service account needs a ClusterRole that may list pods"
    return server, ask_json(_NAME, url, headers, remedy=remedy, ca_file=str(_ACCOUNT / "ca.crt"))


def _ask_kubectl(selector: str) -> tuple[str, dict[str, Any]]:
    """Return the name of kubectl, and its answer to the question for the pods with a label."""
    command = ["kubectl", "get", "pods", "--all-namespaces", f"--selector={selector}", "--output=json"]
    remedy = f"See what `{' '.join(command)}` says"
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            explain(_NAME, "kubectl", expected="an answer", got=f"{error!s:.200}", remedy=remedy)
        ) from None
    if done.returncode:
        got = f"status {done.returncode} ({done.stderr.decode(errors='replace').strip():.200})"
        raise ClusterError(explain(_NAME, "kubectl", expected="an answer", got=got, remedy=remedy))
    return "kubectl", parse_object(_NAME, "kubectl", done.stdout, remedy)

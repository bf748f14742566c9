"""Resolvers that query a cloud for the tasks of a cluster: Google Compute Engine, Kubernetes and SageMaker.

GCEClusterResolver: the instances of an instance group of Google Compute Engine. KubernetesClusterResolver: Kubernetes pods by
label. SageMakerClusterResolver: the hosts in the variables of a SageMaker training job. The clouds' interfaces are used with JSON
over HTTP, by the standard library alone.
"""

from __future__ import annotations

import enum
import http.client
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from ...base.errors import ClusterError, explain
from ...base.files import read_whole
from ..spec import ClusterSpec, validate
from .resolver import ClusterResolver, check_task, task_url, task_url_of_several

__all__ = [
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SageMakerClusterResolver",
    "ask_json",
    "parse_object",
]


_TIME_LIMIT = 30.0
_MOST = 1 << 28  # bytes of a reply


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that rejects redirects: the token must not go to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask_json(
    function: str,
    url: str,
    headers: Mapping[str, str],
    *,
    remedy: str,
    body: Mapping[str, Any] | None = None,
    ca_file: str | None = None,
    proxies: bool = False,
) -> dict[str, Any]:
    """Return the JSON object in a server's reply.

    Args:
        function: the caller, for errors; `remedy`: what to do about them.
        url: the request.
        headers: of the request; they may contain a token, which no error shows.
        body: sent as JSON by POST; default: GET.
        ca_file: certificates that verify the server; default: the system's.
        proxies: use the environment's proxies (`https_proxy`).

    Raises:
        ClusterError: no reply within 30 seconds, an error of the server, or not a JSON object.
    """

    def refuse(got: str) -> ClusterError:
        return ClusterError(explain(function, url, expected="a JSON object", got=got, remedy=remedy))

    data = None if body is None else json.dumps(body).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    try:
        handlers: list[Any] = [
            _NoRedirect(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)),
        ]
        handlers += [] if proxies else [urllib.request.ProxyHandler({})]
        request = urllib.request.Request(url, data, {"Accept": "application/json", **kind, **headers})
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIME_LIMIT) as answer:
            text = answer.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise refuse(f"status {error.code} ({_message(error)})") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise refuse(f"none ({getattr(error, 'reason', error)!s:.200})") from None
    if len(text) > _MOST:
        raise refuse(f"more than {_MOST} bytes")
    return parse_object(function, url, text, remedy)


def parse_object(function: str, source: str, text: bytes | str, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        ClusterError: it is not one.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ClusterError(explain(function, source, expected="a JSON object", got=f"{text[:80]!r}", remedy=remedy))
    return found


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of a server's error: its JSON's, else the standard phrase."""
    try:
        found = json.loads(error.read(1 << 16))
        message = found.get("message") or found["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        message = error.reason
    return f"{message!s:.200}"


@final
class SageMakerClusterResolver(ClusterResolver):
    """The hosts of a SageMaker training job, all of them workers, in the order of their names.

    SM_HOSTS is the JSON list of the hosts, SM_CURRENT_HOST this one; both are read once, in the constructor. If SM_HOSTS is empty
    or lacks this host, the spec is empty and `master()` is "". For one rank per host; for more use `MPIClusterResolver`.

    Args:
        port: of every address.
        task_type, task_id, rpc_layer, environment: override the variables.

    Raises:
        ClusterError: a variable is missing, SM_HOSTS is not a JSON list of unique names, or the task is not in the cluster.

    Source: tf.distribute's resolver of that name, and the variables in https://github.com/aws/sagemaker-training-toolkit.

    Example:
        >>> import os
        >>> os.environ["SM_HOSTS"] = '["algo-1", "algo-2"]'
        >>> os.environ["SM_CURRENT_HOST"] = "algo-2"
        >>> resolver = SageMakerClusterResolver()
        >>> resolver.cluster_spec(), resolver.task_id
        (ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}), 1)
        >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        check_task("SageMakerClusterResolver", task_type, task_id)
        hosts, current = _hosts(), _variable("SM_CURRENT_HOST")
        inside = current in hosts
        self.task_type = ("worker" if inside else None) if task_type is None else task_type
        self.task_id = (hosts.index(current) if inside else None) if task_id is None else task_id
        self.rpc_layer, self.environment = rpc_layer or "", environment or ""
        cluster = {"worker": [f"{host}:{port}" for host in hosts]} if inside else {}
        self._cluster_spec = validate(cluster, self.task_type if cluster else None, self.task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the hosts of the job; empty if it lacks this host."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one; "" if the cluster has at most one."""
        return task_url_of_several(self, task_type, task_id, rpc_layer)


def _error(name: str, expected: str, got: str) -> ClusterError:
    remedy = "SageMaker's training toolkit sets it; elsewhere MPIClusterResolver needs no variable"
    return ClusterError(explain("SageMakerClusterResolver", name, expected=expected, got=got, remedy=remedy))


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if text is None:
        raise _error(name, "a SageMaker training job, with this variable set", "none")
    return text


def _hosts() -> list[str]:
    """Return the names of the hosts, sorted."""
    text = _variable("SM_HOSTS")
    if not text:
        return []
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise _error("SM_HOSTS", 'a JSON list of names, such as ["algo-1", "algo-2"]', f"{text!r:.80}")
    if len(set(hosts)) < len(hosts):
        raise _error("SM_HOSTS", "each host once", f"{text!r:.80}")
    return sorted(hosts)


_NAME = "GCEClusterResolver"
_COMPUTE = "https://compute.googleapis.com/compute/v1"
_METADATA = "metadata.google.internal"


@final
class GCEClusterResolver(ClusterResolver):
    """The running instances of a Compute Engine instance group as tasks of one job, in the order of their addresses.

    Each `cluster_spec()`, and each `master()` of a task, queries Compute Engine. It does not know which instance this process is:
    give each rank its own `task_id`, or None on all, for MPI's order of the ranks. Google's libraries are not needed.

    Args:
        project, zone, instance_group: identify the group.
        port: of every address.
        task_type: the job of all instances.
        task_id: this process's task.
        rpc_layer: protocol before addresses.
        credentials: an object whose `token` is an access token, such as google.auth's; "default": the token of the instance's
            service account, from the metadata server (at GCE_METADATA_HOST if set).
        service: the result of `googleapiclient.discovery.build("compute", "v1")`, queried instead, without `credentials`.

    Raises:
        ClusterError: an argument has another form. Also from `cluster_spec()`: a server is unreachable or refuses.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/GCEClusterResolver;
    https://cloud.google.com/compute/docs/reference/rest/v1/instanceGroups/listInstances.

    Example:
        >>> resolver = ms.cluster_resolver.GCEClusterResolver(
        ...     "project", "us-west1-a", "group", 8470, task_id=1
        ... )
        >>> resolver.master()  # doctest: +SKIP
        'grpc://10.0.0.8:8470'
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        for argument, value in (("project", project), ("zone", zone), ("instance_group", instance_group)):
            if not isinstance(value, str) or not value:
                raise ClusterError(explain(_NAME, argument, expected="a name", got=f"{value!r:.80}"))
        if credentials != "default" and not hasattr(credentials, "token"):
            expected = '"default" or an object with a token'
            raise ClusterError(explain(_NAME, "credentials", expected=expected, got=f"a {type(credentials).__name__}"))
        check_task(_NAME, task_type, task_id)
        self._zone, self._group, self._port, self._job = (project, zone), instance_group, port, task_type
        self._credentials, self._service = credentials, service
        self.task_type = task_type if task_id is not None else None
        self.task_id, self.rpc_layer = task_id, rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the instances that are running now.

        Raises:
            ClusterError: see the class.
        """
        found = self._by_service() if self._service is not None else self._by_http()
        try:
            addresses = [f"{instance['networkInterfaces'][0]['networkIP']}:{self._port}" for instance in found]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            expected, got = "instances of a network", f"another answer for {self._group!r}"
            raise ClusterError(explain(_NAME, "instance_group", expected=expected, got=got)) from error
        return validate({self._job: sorted(addresses)})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one; "" if it has none."""
        return task_url(self, task_type, task_id, rpc_layer)

    def _by_service(self) -> Iterator[Mapping[str, Any]]:
        """Yield the instances from Google's library."""
        project, zone = self._zone
        groups, instances = self._service.instanceGroups(), self._service.instances()
        request = groups.listInstances(
            project=project,
            zone=zone,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            page = request.execute()
            for item in page.get("items", []):
                yield instances.get(project=project, zone=zone, instance=_last_part(item["instance"])).execute()
            request = groups.listInstances_next(previous_request=request, previous_response=page)

    def _by_http(self) -> Iterator[Mapping[str, Any]]:
        """Yield the instances from Compute Engine."""
        base = f"{_COMPUTE}/projects/{quote(self._zone[0], safe=':')}/zones/{quote(self._zone[1], safe='')}"
        headers = {"Authorization": f"Bearer {self._token()}"}
        remedy = "The account needs the role compute.viewer, and the instance the scope compute.readonly"
        page, token = f"{base}/instanceGroups/{quote(self._group, safe='')}/listInstances?orderBy=name", ""
        while True:
            url = f"{page}&pageToken={quote(token, safe='')}" if token else page
            body = {"instanceState": "RUNNING"}
            found = ask_json(_NAME, url, headers, body=body, remedy=remedy, proxies=True)
            for item in found.get("items", []):
                name = quote(_last_part(item["instance"]), safe="")
                yield ask_json(_NAME, f"{base}/instances/{name}", headers, remedy=remedy, proxies=True)
            token = found.get("nextPageToken", "")
            if not token:
                return

    def _token(self) -> str:
        """Return an access token."""
        if self._credentials != "default":
            return str(self._credentials.token)
        host = os.environ.get("GCE_METADATA_HOST") or _METADATA
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        remedy = "Outside Compute Engine pass credentials, such as google.auth's"
        found = ask_json(_NAME, url, {"Metadata-Flavor": "Google"}, remedy=remedy)
        token = found.get("access_token")
        if not isinstance(token, str) or not token:
            raise ClusterError(explain(_NAME, url, expected="an access token", got="none", remedy=remedy))
        return token


def _last_part(url: str) -> str:
    """Return the name at the end of an instance's URL."""
    return url.rpartition("/")[2]


_POD_NAME = "KubernetesClusterResolver"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECTL_TIME_LIMIT = 60.0


@final
class KubernetesExecutableLocation(enum.Enum):
    """The location of the program, which determines how it queries Kubernetes.

    Attributes:
        WITHIN_CLUSTER: in a pod, which has a service account.
        OFF_CLUSTER: elsewhere, with `kubectl` and its configuration.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ClusterResolver):
    """The pods with certain labels as tasks, each at the address of its node.

    A job's tasks are the pods of its first selector in the order of their names, then those of the next. Each `cluster_spec()`,
    and each `master()` of a task, queries Kubernetes. It does not know which pod this process is: set `task_type` and `task_id`
    afterwards, or the order of the ranks is MPI's. In a pod the API server is queried with the service account that Kubernetes
    mounts, which must be allowed to list pods of all namespaces; elsewhere `kubectl` is, with your configuration. The package
    `kubernetes` is not needed.

    Args:
        job_to_label_mapping: the label selectors of each job (`{"worker": ["job-name=trainer"]}`); default:
            `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: of every address.
        rpc_layer: protocol before addresses.
        override_client: an object with the method `list_pod_for_all_namespaces(label_selector=…)`, such as
            `kubernetes.client.CoreV1Api()`; queried instead.
        executable_location: the location of this process.

    Raises:
        ClusterError: an argument has another form. Also from `cluster_spec()`: Kubernetes is unreachable or refuses, a pod is not
            running, or the jobs break a rule of roles.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver;
    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod.

    Example:
        >>> pods = {"worker": ["job-name=trainer"]}
        >>> resolver = ms.cluster_resolver.KubernetesClusterResolver(pods)
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
            raise ClusterError(explain(_POD_NAME, "executable_location", expected=expected, got=f"{given!r:.80}"))
        self._selectors = _checked(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port, self._client, self._location = tf_server_port, override_client, executable_location
        self.rpc_layer = rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the current pods.

        Raises:
            ClusterError: see the class.
        """
        jobs = self._selectors.items()
        return validate(
            {job: [self._address(*pod) for text in texts for pod in self._pods(text)] for job, texts in jobs}
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of the one that was set; "" without one."""
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
            raise ClusterError(explain(_POD_NAME, source, expected="a list of pods", got=f"{found!r:.80}")) from None
        return sorted(pods, key=_name)

    def _address(self, name: str, phase: str, host: str) -> str:
        if phase != "Running" or not host:
            remedy = "Wait until all are, as with kubectl wait"
            expected, got = f"pod {name} to be running", f"phase {phase}, node {host or 'unknown'}"
            raise ClusterError(explain(_POD_NAME, "job_to_label_mapping", expected=expected, got=got, remedy=remedy))
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
    raise ClusterError(explain(_POD_NAME, "job_to_label_mapping", expected=expected, got=f"{jobs!r:.120}"))


def _ask_server(selector: str) -> tuple[str, dict[str, Any]]:
    """Return the API server, and its reply to this pod's service account with the pods of a label."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    try:
        token = read_whole(_ACCOUNT / "token").decode().strip()
    except (OSError, ValueError):
        token = ""
    if not (host and port and token):
        got = "no KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT" if token else f"no {_ACCOUNT / 'token'}"
        remedy = "Elsewhere, pass executable_location=OFF_CLUSTER, which asks kubectl"
        expected = "a pod with a service account"
        raise ClusterError(explain(_POD_NAME, "executable_location", expected=expected, got=got, remedy=remedy))
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    url = f"{server}/api/v1/pods?labelSelector={quote(selector, safe='')}"
    headers = {"Authorization": f"Bearer {token}"}
    remedy = "The pod's service account needs a ClusterRole that may list pods"
    return server, ask_json(_POD_NAME, url, headers, remedy=remedy, ca_file=str(_ACCOUNT / "ca.crt"))


def _ask_kubectl(selector: str) -> tuple[str, dict[str, Any]]:
    """Return the name of kubectl, and its reply with the pods of a label."""
    command = ["kubectl", "get", "pods", "--all-namespaces", f"--selector={selector}", "--output=json"]
    remedy = f"Check the output of `{' '.join(command)}`"
    try:
        done = subprocess.run(command, capture_output=True, timeout=_KUBECTL_TIME_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            explain(_POD_NAME, "kubectl", expected="an answer", got=f"{error!s:.200}", remedy=remedy)
        ) from None
    if done.returncode:
        got = f"status {done.returncode} ({done.stderr.decode(errors='replace').strip():.200})"
        raise ClusterError(explain(_POD_NAME, "kubectl", expected="an answer", got=got, remedy=remedy))
    return "kubectl", parse_object(_POD_NAME, "kubectl", done.stdout, remedy)

"""Resolvers of clouds: what they ask, of servers that answer here, and what they say of wrong answers."""

import http.server
import json
import shutil
import ssl
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from mpistrat.cluster.resolvers import clouds
from mpistrat.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SageMakerClusterResolver,
)
from mpistrat.errors import ClusterError


class Server(http.server.ThreadingHTTPServer):
    """Answers by a dict from path to a value, or to a status and a value; keeps what was asked."""

    def __init__(self, certificate=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.asked = {}, []
        self.address = f"127.0.0.1:{self.server_port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request, client_address):
        """A client that refuses the certificate is no error of the test."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        found = self.server.answers.get(self.path, (404, {"message": f"no {self.path}"}))
        status, value = found if isinstance(found, tuple) else (200, found)
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"http://{self.server.address}/elsewhere")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *args):
        pass


def running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server():
    yield from running(Server())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl for a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    files = str(folder / "ca.crt"), str(folder / "key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


@pytest.fixture
def api_server(certificate, tmp_path, monkeypatch):
    """The API server of Kubernetes over TLS, and this process in a pod with an account."""
    (tmp_path / "token").write_text("secret\n")
    shutil.copy(certificate[0], tmp_path / "ca.crt")
    monkeypatch.setattr(clouds, "_ACCOUNT", tmp_path)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens; the API server is asked directly
    for found in running(Server(certificate)):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(found.server_port))
        yield found


def pod(name, host, phase="Running"):
    return {"metadata": {"name": name}, "status": {"phase": phase, "hostIP": host}}


PODS = "/api/v1/pods?labelSelector="


def test_kubernetes_asks_the_api_server(api_server):
    api_server.answers[PODS + "job-name%3Da"] = {"items": [pod("a-1", "10.0.0.1"), pod("a-0", "10.0.0.9")]}
    api_server.answers[PODS + "job-name%20in%20%28b%2Cc%29"] = {"items": [pod("b-0", "10.0.0.2")]}
    api_server.answers[PODS + "role%3Dps"] = {"items": [pod("p", "10.0.0.3")]}
    resolver = KubernetesClusterResolver({"worker": ["job-name=a", "job-name in (b,c)"], "ps": ["role=ps"]}, 99)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.master()) == (None, None, "grpc", "")
    assert api_server.asked == []
    workers = ["10.0.0.9:99", "10.0.0.1:99", "10.0.0.2:99"]
    assert resolver.cluster_spec() == {"worker": workers, "ps": ["10.0.0.3:99"]}
    assert {headers["Authorization"] for _, _, headers, _ in api_server.asked} == {"Bearer secret"}
    assert resolver.master("worker", 1) == "grpc://10.0.0.1:99"
    api_server.answers[PODS + "role%3Dps"] = {"items": [pod("p", "10.0.0.4")]}
    assert resolver.cluster_spec().task_address("ps", 0) == "10.0.0.4:99"  # asked each time


def test_kubernetes_default_label(api_server):
    api_server.answers[PODS + "job-name%3Dtensorflow"] = {"items": [pod("a", "h")]}
    assert KubernetesClusterResolver().cluster_spec() == {"worker": ["h:8470"]}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"items": [pod("a-0", "h", "Pending")]}, "pod a-0 to be running, got phase Pending"),
        ({"items": [pod("a-0", "")]}, "node unknown"),
        ({"items": [{}]}, "a list of pods"),
        ({"kind": "PodList"}, "a list of pods"),
        ({"items": None}, "a list of pods"),
        ([1], "a JSON object"),
        (b"<html>", "<html>"),
        ((403, {"message": "pods is forbidden"}), "status 403 (pods is forbidden)"),
        ((500, b"?"), "status 500 (Internal Server Error)"),
        ((302, b""), "status 302"),
    ],
)
def test_kubernetes_says_what_is_wrong(api_server, answer, named):
    api_server.answers[PODS + "job-name%3Dtensorflow"] = answer
    with pytest.raises(ClusterError) as error:
        KubernetesClusterResolver().cluster_spec()
    assert named in str(error.value)
    assert "secret" not in str(error.value)
    assert len(api_server.asked) == 1  # no token goes elsewhere


def test_kubernetes_trusts_only_its_own_certificates(api_server, tmp_path):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=other"]
    command += ["-out", tmp_path / "ca.crt", "-keyout", tmp_path / "key"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises(ClusterError, match="certificate verify failed"):
        KubernetesClusterResolver().cluster_spec()
    assert api_server.asked == []


@pytest.mark.parametrize(("missing", "named"), [("token", "token"), ("variables", "KUBERNETES_SERVICE_HOST")])
def test_kubernetes_outside_a_pod(tmp_path, monkeypatch, missing, named):
    monkeypatch.setattr(clouds, "_ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if missing == "variables":
        (tmp_path / "token").write_text("secret")
    with pytest.raises(ClusterError, match=named) as error:
        KubernetesClusterResolver().cluster_spec()
    assert "OFF_CLUSTER" in str(error.value)


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl that does what the test says; returns a function that sets its program."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def set_program(program):
        (tmp_path / "kubectl").write_text(f"#!{sys.executable}\nimport json, sys\n{program}\n")
        (tmp_path / "kubectl").chmod(0o755)

    return set_program


def off_cluster():
    location = KubernetesExecutableLocation.OFF_CLUSTER
    return KubernetesClusterResolver({"worker": ["a=b"]}, executable_location=location).cluster_spec()


def test_kubernetes_asks_kubectl(kubectl):
    kubectl(
        "assert sys.argv[1:] == ['get', 'pods', '--all-namespaces', '--selector=a=b', '--output=json'], sys.argv\n"
        f"print(json.dumps({{'items': [{pod('x', 'h')!r}]}}))"
    )
    assert off_cluster() == {"worker": ["h:8470"]}


@pytest.mark.parametrize(
    ("program", "named"),
    [("sys.exit('no context')", "status 1 (no context)"), ("print('?')", "a JSON object"), (None, "kubectl")],
)
def test_kubectl_fails(kubectl, program, named):
    if program:
        kubectl(program)
    with pytest.raises(ClusterError) as error:
        off_cluster()
    assert named in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"job_to_label_mapping": {"worker": "a=b"}},
        {"job_to_label_mapping": ["worker"]},
        {"job_to_label_mapping": {"worker": [1]}},
        {"executable_location": "WITHIN_CLUSTER"},
    ],
)
def test_kubernetes_arguments(arguments):
    with pytest.raises(ClusterError, match=next(iter(arguments))):
        KubernetesClusterResolver(**arguments)


TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"
GROUP = "/projects/p/zones/z/instanceGroups/g/listInstances?orderBy=name"


@pytest.fixture
def google(server, monkeypatch):
    """The metadata server and Compute Engine, in one."""
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(clouds, "_COMPUTE", f"http://{server.address}")
    server.answers[TOKEN] = {"access_token": "secret", "expires_in": 3600}
    instances = f"http://{server.address}/projects/p/zones/z/instances"
    server.answers[GROUP] = {"items": [{"instance": f"{instances}/i1"}], "nextPageToken": "m="}
    server.answers[f"{GROUP}&pageToken=m%3D"] = {"items": [{"instance": f"{instances}/i2"}]}
    for name, address in (("i1", "10.0.0.2"), ("i2", "10.0.0.1")):
        server.answers[f"/projects/p/zones/z/instances/{name}"] = {"networkInterfaces": [{"networkIP": address}]}
    return server


def test_gce_asks_the_servers(google):
    resolver = GCEClusterResolver("p", "z", "g", 8470)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
    assert google.asked == []
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert google.asked[0][2]["Metadata-Flavor"] == "Google"
    assert {headers["Authorization"] for _, _, headers, _ in google.asked[1:]} == {"Bearer secret"}
    lists = [(method, json.loads(body)) for method, path, _, body in google.asked if "listInstances" in path]
    assert lists == [("POST", {"instanceState": "RUNNING"})] * 2
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1, rpc_layer="mpi") == "mpi://10.0.0.2:8470"


def test_gce_credentials(google):
    resolver = GCEClusterResolver("p", "z", "g", 1, task_type="chief", credentials=SimpleNamespace(token="own"))
    google.answers[GROUP] = {"items": [{"instance": "i2"}]}
    assert resolver.cluster_spec() == {"chief": ["10.0.0.1:1"]}
    assert [headers["Authorization"] for _, _, headers, _ in google.asked] == ["Bearer own"] * 2


def test_gce_without_a_task(google):
    resolver = GCEClusterResolver("p", "z", "g", 1, task_id=None)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_gce_empty_group(google):
    google.answers[GROUP] = {}
    assert GCEClusterResolver("p", "z", "g", 1).cluster_spec().num_tasks("worker") == 0


@pytest.mark.parametrize(
    ("path", "answer", "named"),
    [
        (TOKEN, (404, b""), "status 404"),
        (TOKEN, {}, "an access token"),
        (GROUP, (403, {"error": {"message": "no scope"}}), "status 403 (no scope)"),
        (GROUP, {"items": [{}]}, "instances of a network"),
        ("/projects/p/zones/z/instances/i1", {"networkInterfaces": []}, "instances of a network"),
    ],
)
def test_gce_says_what_is_wrong(google, path, answer, named):
    google.answers[path] = answer
    with pytest.raises(ClusterError) as error:
        GCEClusterResolver("p", "z", "g", 1).cluster_spec()
    assert named in str(error.value)
    assert "secret" not in str(error.value)


def test_gce_outside_compute_engine(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(ClusterError, match=r"credentials.*google\.auth"):
        GCEClusterResolver("p", "z", "g", 1).cluster_spec()


@pytest.mark.parametrize(
    "arguments", [{"project": ""}, {"zone": None}, {"instance_group": 1}, {"credentials": 1}, {"task_id": -1}]
)
def test_gce_arguments(arguments):
    with pytest.raises(ClusterError, match=next(iter(arguments))):
        GCEClusterResolver(**{"project": "p", "zone": "z", "instance_group": "g", "port": 1, **arguments})


def set_sagemaker(monkeypatch, hosts, current):
    for name, value in (("SM_HOSTS", hosts), ("SM_CURRENT_HOST", current)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("hosts", "current", "spec", "task", "master"),
    [
        ('["b", "a", "c"]', "b", {"worker": ["a:2223", "b:2223", "c:2223"]}, ("worker", 1), "b:2223"),
        ('["a"]', "a", {"worker": ["a:2223"]}, ("worker", 0), ""),
        ('["a"]', "x", {}, (None, None), ""),
        ("", "a", {}, (None, None), ""),
    ],
)
def test_sagemaker(monkeypatch, hosts, current, spec, task, master):
    set_sagemaker(monkeypatch, hosts, current)
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec() == spec
    assert ((resolver.task_type, resolver.task_id), resolver.master()) == (task, master)


def test_sagemaker_arguments(monkeypatch):
    set_sagemaker(monkeypatch, '["a", "b"]', "b")
    resolver = SageMakerClusterResolver(5, "worker", 0, "grpc", "cloud")
    assert resolver.master() == "grpc://a:5"
    assert resolver.environment == "cloud"


@pytest.mark.parametrize(
    ("hosts", "current", "named"),
    [
        (None, "a", "SM_HOSTS"),
        ('["a"]', None, "SM_CURRENT_HOST"),
        ("a,b", "a", "SM_HOSTS"),
        ('{"a": 1}', "a", "SM_HOSTS"),
        ("[1]", "1", "SM_HOSTS"),
        ('["a", "a"]', "a", "each host once"),
    ],
)
def test_sagemaker_says_what_is_wrong(monkeypatch, hosts, current, named):
    set_sagemaker(monkeypatch, hosts, current)
    with pytest.raises(ClusterError, match=named):
        SageMakerClusterResolver()


def test_sagemaker_task_that_is_not_there(monkeypatch):
    set_sagemaker(monkeypatch, '["a", "b"]', "a")
    with pytest.raises(ClusterError, match="one of the 2 tasks"):
        SageMakerClusterResolver(task_id=2)

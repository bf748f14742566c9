"""GCEClusterResolver: the cluster as an instance group of Google Compute Engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, final
from urllib.parse import quote

from ...base.errors import ClusterError, explain
from ..spec import ClusterSpec, validate
from .http_json import ask_json
from .resolver import ClusterResolver, check_task, task_url

__all__ = ["GCEClusterResolver"]

_NAME = "GCEClusterResolver"
_COMPUTE = "https://compute.googleapis.com/compute/v1"
_METADATA = "metadata.google.internal"


@final
class GCEClusterResolver(ClusterResolver):
    """The running instances of a Compute Engine instance group as tasks of one job, in the order of their addresses.

    Compute Engine is asked at each `cluster_spec()`, and `master()` of a task. It does not tell which instance this process
    is: give each rank its own `task_id`, or None on all, for MPI's order of the ranks. Google's libraries are not needed.

    Args:
        project, zone, instance_group: which group.
        port: of every address.
        task_type: the job of all instances.
        task_id: which of its tasks this process is.
        rpc_layer: protocol before addresses.
        credentials: an object whose `token` is an access token, such as google.auth's; "default": the token of the instance's
            service account, from the metadata server (at GCE_METADATA_HOST, where this is set).
        service: what `googleapiclient.discovery.build("compute", "v1")` returns; asked instead, without `credentials`.

    Raises:
        ClusterError: an argument has another form. Then `cluster_spec()`: a server cannot be asked or refuses.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/GCEClusterResolver;
    https://cloud.google.com/compute/docs/reference/rest/v1/instanceGroups/listInstances.

    Example:
        >>> resolver = ms.cluster_resolver.GCEClusterResolver("project", "us-west1-a", "group", 8470, task_id=1)
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
        """Return what Google's library says of each instance."""
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
        """Return what Compute Engine says of each instance."""
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

"""Who may talk to whom under a list of NetworkPolicies, as the API's documentation defines it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any

Policy = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "hpml"
    address: str = ""  # instead of labels


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects what has these labels; an empty one selects everything."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", []):
        match term["operator"]:
            case "Exists":
                holds = term["key"] in labels
            case "In":
                holds = labels.get(term["key"]) in term["values"]
            case operator:
                raise NotImplementedError(operator)
        if not holds:
            return False
    return True


def allowed(policies: list[Policy], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` may open a connection to `port` of `target`: both ends have to allow it."""
    leaves = _side(policies, source, "Egress", "egress", "to", target, port, protocol)
    enters = _side(policies, target, "Ingress", "ingress", "from", source, port, protocol)
    return leaves and enters


def _side(
    policies: list[Policy],
    subject: Peer,
    kind: str,
    rules: str,
    peers: str,
    other: Peer,
    port: int,
    protocol: str,
) -> bool:
    applying = [
        policy["spec"]
        for policy in policies
        if not subject.address
        and policy["metadata"]["namespace"] == subject.namespace
        and kind in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], subject.labels)
    ]
    if not applying:
        return True
    return any(
        _port(rule, port, protocol) and _peer(rule.get(peers), subject, other)
        for spec in applying
        for rule in spec.get(rules, [])
    )


def _port(rule: dict[str, Any], port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(each["port"] == port and each["protocol"] == protocol for each in ports)


def _peer(peers: list[dict[str, Any]] | None, subject: Peer, other: Peer) -> bool:
    return peers is None or any(_is(peer, subject, other) for peer in peers)


def _is(peer: dict[str, Any], subject: Peer, other: Peer) -> bool:
    if "ipBlock" in peer:
        if not other.address:
            return False
        address = ipaddress.ip_address(other.address)
        within = [ipaddress.ip_network(peer["ipBlock"]["cidr"])]
        without = [ipaddress.ip_network(net) for net in peer["ipBlock"].get("except", [])]
        return any(address in net for net in within) and not any(address in net for net in without)
    if other.address:
        return False
    if "namespaceSelector" in peer:
        namespace = {"kubernetes.io/metadata.name": other.namespace}
        if not matches(peer["namespaceSelector"], namespace):
            return False
    elif other.namespace != subject.namespace:
        return False
    return matches(peer.get("podSelector", {}), other.labels)

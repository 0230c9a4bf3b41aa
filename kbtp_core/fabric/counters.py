"""The names of the software RNIC's counters, declared once; `QueuePair.stats` and `SoftRnic.stats` return them.

Counters only grow. Those of a device are the sums over the queue pairs that it has and had. Start-up frames are not counted.
"""

from __future__ import annotations

COUNTERS = {
    "bytes_sent": "Octets of FPDUs that the socket took: headers, payloads, padding, CRCs and markers.",
    "bytes_received": "Octets that came from the socket after the start-up frame.",
    "fpdus_sent": "FPDUs made for the socket.",
    "fpdus_received": "Whole FPDUs that came, those with a wrong CRC too.",
    "messages_sent": "DDP messages, counted when their last FPDU is made: requests, responses, Sends, Writes, Terminates.",
    "messages_received": "DDP messages that came whole and broke no rule.",
    "crc_errors": "FPDUs with a wrong CRC. One ends its connection.",
    "terminates_sent": "Terminates that the socket took: the peer broke a rule.",
    "terminates_received": "Terminates that came: the peer says that this side broke a rule.",
    "retransmitted_segments": "TCP segments that the kernel sent more than once: loss on the network.",
    "ord_stalls": "Reads and atomics that had to wait because as many were outstanding as the peer takes (ORD).",
    "socket_stalls": "Times the socket took less than it was offered: the peer, or the network, is slower than this side.",
    "executed_loads": "LOADs that the executor ran.",
    "executed_stores": "STOREs and ALLOC_STOREs that the executor ran.",
    "executed_frees": "FREEs that the executor ran.",
    "executed_keyed": "LOOKUPs, PUBLISHes and REMOVEs of the store extension that the executor ran.",
}
"""Of a queue pair and of a device."""

BY_CODE = {
    "terminates_sent_L_T_CC": "Of terminates_sent, those with layer L, type T and code CC (hexadecimal), as in RFC 5040 section 4.8.",
    "terminates_received_L_T_CC": "The same of terminates_received.",
}
"""Of a queue pair and of a device; a name is there once its Terminate was."""

PAIR_VALUES = {
    "peer_ird": "How many Reads and atomics the peer said it takes at once.",
    "peer_ord": "How many Reads and atomics the peer said it may have outstanding.",
    "stores_under_way": "Stores of the executor whose data has not come yet (no counter: it falls).",
}
"""Of a queue pair only: what start-up agreed, and what is now."""

DEVICE_VALUES = {
    "queue_pairs": "Queue pairs that have not ended (no counter: it falls).",
    "queue_pairs_ended": "Queue pairs that have ended.",
    "capture_packets": "Packets written to the capture.",
    "capture_bytes": "Size of the capture in octets, with its header.",
    "capture_dropped_packets": "Packets not written because the capture was full, or had failed.",
    "capture_errors": "Errors of the capture's file. The first one ends the capture.",
}
"""Of a device only."""

"""Prefix killers: what varies near the front of prompts that agree behind it.

seen.py         a prompt as it is remembered: its text, its messages, its anchors
aligning.py     two prompts: where they part, and what they have in common behind that
values.py       what varies: a time, an id, a name, a header; or the same things in another order
comparing.py    a lost prompt beside an earlier one -> what was lost, and to what
finder.py       many prompts -> findings, in bounded memory
findings.py     what is said of a finding, and the advice
watch.py        the router's side: a thread that spends at most a small share of its time on this
"""

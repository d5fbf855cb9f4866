"""Workloads, load client and reports: measures any OpenAI-compatible server and the parts of this one."""

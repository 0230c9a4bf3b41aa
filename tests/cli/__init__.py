"""Tests of kbtp_core.cli and kbtp_core.config."""

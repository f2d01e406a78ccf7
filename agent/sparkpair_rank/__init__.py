"""The rank agent: owns one node's vLLM processes and agrees with its peers on when they run. Standard library alone."""

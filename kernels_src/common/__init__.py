"""What kernels share: macros and device headers. No kernel is declared here."""

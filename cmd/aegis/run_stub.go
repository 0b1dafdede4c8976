package main

const watchdogArg = "watchdog"

func watchdog() int { return 1 }

//go:build !unix

package main

// lockFile does nothing where there is no flock.
func lockFile(string) (func(), error) { return func() {}, nil }

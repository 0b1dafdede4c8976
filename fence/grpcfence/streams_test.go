package grpcfence_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"aegis/fence"
	"aegis/fence/grpcfence"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestStreams(t *testing.T) {
	for name, claim := range map[string]func(t *testing.T, s *kv){
		"IdleOneEndsAtOnceAndKeepsNobodyWaiting": func(t *testing.T, s *kv) {
			stream, err := openFeed(under(t, boss(7)), s.conn)
			if err != nil {
				t.Fatal(err)
			}
			if err := tell(stream, message); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			advance(t, s.guard, boss(8)) // the handler waits for a message that does not come
			if took := time.Since(start); took > 2*time.Second {
				t.Errorf("Advance took %v", took)
			}
			refused(t, stream.RecvMsg(new(wrapperspb.StringValue)), 7, 8)
			if s.read("key") != "value" {
				t.Error("what was received before was not done")
			}
		},
		"MessageUnderWayIsWaitedFor": func(t *testing.T, s *kv) {
			started, taken, let := make(chan struct{}), make(chan struct{}), make(chan struct{})
			s.put = func(ctx context.Context, _, _ string) error {
				close(started)
				<-ctx.Done()
				close(taken)
				<-let
				return nil
			}
			stream, err := openFeed(under(t, boss(7)), s.conn)
			if err != nil {
				t.Fatal(err)
			}
			answered := async(func() error { return tell(stream, message) })
			wait(t, "the handler", started)
			advanced := async(func() error { return s.guard.Advance(bounded(t), boss(8)) })
			wait(t, "the takeover", taken)
			select {
			case err := <-advanced:
				t.Errorf("Advance did not wait: %v", err)
			default:
			}
			close(let)
			if err := wait(t, "the answer", answered); err != nil {
				t.Errorf("the message was done, but: %v", err)
			}
			if err := wait(t, "Advance", advanced); err != nil {
				t.Error(err)
			}
			refused(t, stream.RecvMsg(new(wrapperspb.StringValue)), 7, 8)
		},
		"HandlerThatGoesOnGetsNoMessage": func(t *testing.T, s *kv) {
			got := make(chan error, 4)
			s.feed = func(stream grpc.ServerStream, recv func() (string, error), _ work) error {
				for range 3 {
					_, err := recv()
					got <- err
				}
				return nil
			}
			stream, err := openFeed(under(t, boss(7)), s.conn)
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.SendMsg(wrapperspb.String("one")); err != nil {
				t.Fatal(err)
			}
			if err := wait(t, "the first message", got); err != nil {
				t.Fatal(err)
			}
			advance(t, s.guard, boss(8))
			refused(t, stream.RecvMsg(new(wrapperspb.StringValue)), 7, 8) // at once, whatever the handler does
			refused(t, wait(t, "the second", got), 7, 8)
			refused(t, wait(t, "the third", got), 7, 8)
		},
		"ClientThatReadsNothingKeepsNobodyWaiting": func(t *testing.T, s *kv) {
			started, left := make(chan struct{}), make(chan error, 1)
			s.feed = func(stream grpc.ServerStream, recv func() (string, error), _ work) error {
				close(started)
				for {
					if err := stream.SendMsg(wrapperspb.String(strings.Repeat("x", 1<<20))); err != nil {
						left <- err
						return err
					}
				}
			}
			stream, err := openFeed(under(t, boss(7)), s.conn)
			if err != nil {
				t.Fatal(err)
			}
			wait(t, "the handler", started)
			advance(t, s.guard, boss(8))
			wait(t, "the handler's end", left)
			for err == nil {
				err = stream.RecvMsg(new(wrapperspb.StringValue))
			}
			if !errors.Is(err, fence.ErrUnknown) {
				t.Errorf("got %v", err)
			}
		},
		"AreRefusedAtTheirStart": func(t *testing.T, s *kv) {
			advance(t, s.guard, boss(8))
			refused(t, viaStream(under(t, boss(7)), s.conn, message), 7, 8)
			refused(t, viaStream(under(t, boss(9)), s.conn, message), 9, 8)
			if err := viaStream(under(t, boss(8)), s.conn, message); err != nil {
				t.Error(err)
			}
		},
		"RefusedMessageIsNotOKWhateverTheHandlerSays": func(t *testing.T, s *kv) {
			started := make(chan struct{})
			s.feed = func(stream grpc.ServerStream, recv func() (string, error), _ work) error {
				close(started)
				<-stream.Context().Done()
				_, _ = recv()
				return nil
			}
			stream, err := openFeed(under(t, boss(7)), s.conn)
			if err != nil {
				t.Fatal(err)
			}
			wait(t, "the handler", started)
			advance(t, s.guard, boss(8))
			refused(t, end(stream), 7, 8)
		},
		"PanicReachesTheServersInterceptors": func(t *testing.T, s *kv) {
			s.feed = func(grpc.ServerStream, func() (string, error), work) error { panic("loot table") }
			if err := viaStream(under(t, boss(7)), s.conn, message); err == nil || !strings.Contains(err.Error(), "recovered: loot table") {
				t.Errorf("got %v", err)
			}
			advance(t, s.guard, boss(8))
		},
		"ClientThatGoesAwayEndsIt": func(t *testing.T, s *kv) {
			left := make(chan error, 1)
			s.feed = func(stream grpc.ServerStream, recv func() (string, error), _ work) error {
				_, err := recv()
				left <- err
				return err
			}
			ctx, cancel := context.WithCancel(under(t, boss(7)))
			if _, err := openFeed(ctx, s.conn); err != nil {
				t.Fatal(err)
			}
			cancel()
			select {
			case err := <-left:
				if err == nil || errors.Is(err, fence.ErrFenced) {
					t.Errorf("got %v", err)
				}
			case <-time.After(time.Second): // the stream never reached the server
			}
			advance(t, s.guard, boss(8))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newKV(t, grpcfence.Config{Drain: 4 * time.Second})
			advance(t, s.guard, boss(7))
			claim(t, s)
		})
	}
}

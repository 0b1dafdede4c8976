package grpcfence_test

import (
	"context"
	"errors"
	"fmt"
	"net"

	"aegis/fence"
	"aegis/fence/grpcfence"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// A loot service in memory. The old leader comes back after a pause and is refused by the service itself.
func Example() {
	guard, err := grpcfence.New(grpcfence.Config{})
	check(err)
	server := grpc.NewServer(grpc.UnaryInterceptor(guard.UnaryServerInterceptor()), grpc.StreamInterceptor(guard.StreamServerInterceptor()))
	guard.Register(server)
	registerLoot(server, func(ctx context.Context) (string, error) {
		term, _ := grpcfence.TermFromContext(ctx) // for the guard of a store behind this service
		return fmt.Sprintf("%s hands out the loot", term.Node), nil
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	go server.Serve(listener)
	defer server.Stop()

	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(grpcfence.UnaryClientInterceptor()), grpc.WithStreamInterceptor(grpcfence.StreamClientInterceptor()))
	check(err)
	defer conn.Close()
	remote := grpcfence.NewRemote(conn)
	settle := func(t fence.Term) {
		answer := new(wrapperspb.StringValue)
		err := conn.Invoke(grpcfence.WithTerm(context.Background(), t), "/game.Loot/Settle", wrapperspb.String("kill-4711"), answer)
		if fenced := (*fence.FencedError)(nil); errors.As(err, &fenced) {
			fmt.Println(fenced)
			return
		}
		check(err)
		fmt.Println(answer.Value)
	}

	old := fence.Term{Election: "boss/frost", Node: "scene-01", Token: 7}
	check(remote.Advance(context.Background(), old)) // with aegis: WithGuards(remote), before the term's first read
	settle(old)

	next := fence.Term{Election: "boss/frost", Node: "scene-02", Token: 8}
	check(remote.Advance(context.Background(), next))
	settle(next)
	settle(old)

	// Output:
	// scene-01 hands out the loot
	// scene-02 hands out the loot
	// fenced: "boss/frost" token 7 refused: the guard's newest is 8; the term is over, stop its work
}

// registerLoot does what generated code does.
func registerLoot(s grpc.ServiceRegistrar, settle func(ctx context.Context) (string, error)) {
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "game.Loot", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
		MethodName: "Settle",
		Handler: func(srv any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := dec(in); err != nil {
				return nil, err
			}
			return i(ctx, in, &grpc.UnaryServerInfo{FullMethod: "/game.Loot/Settle"}, func(ctx context.Context, _ any) (any, error) {
				answer, err := settle(ctx)
				return wrapperspb.String(answer), err
			})
		},
	}}}, nil)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
